"""A reward of a user's own: what it may return, and that its faults are named and never a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.environments.contract.verifier import Verdict, message_item, reasoning_item, response_object
from recipes.environments.verifiers.reward import VERIFIER, RewardError, Settings
from recipes.types import Row

ROW: Row = {"responses_create_params": {"input": "2 + 2 = ?"}, "expected_answer": "4", "big": 1 << 70}


def scored(path: Path, source: str, answer: str = "4") -> Verdict:
    path.write_text(source, encoding="utf-8")
    task = VERIFIER.parse_task(ROW, Settings(file=str(path)))
    hash(task)  # it goes to a scoring process, and its verdict into a cache
    found = VERIFIER.score(response_object([reasoning_item(["hm"]), message_item(answer)]), task)
    assert isinstance(found, Verdict)
    return found


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return float(response == row['expected_answer'])", 1.0),
        ("return response == '5'", 0.0),
        ("return -2", -2.0),
        ("return row['big'] == 1 << 70", 1.0),
        ("import math\n    return math.sqrt(len(response))", 1.0),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_numbers_are_rewards(tmp_path: Path, body: str, reward: float, kind: str) -> None:
    verdict = scored(tmp_path / f"{kind[:3]}{abs(hash(body))}.py", f"{kind} score(response, row):\n    {body}\n")
    assert verdict.reward == reward


def test_a_verdict_says_why(tmp_path: Path) -> None:
    source = (
        "from recipes.environments.contract.verifier import Verdict\n"
        "def score(response, row):\n    return Verdict(reward=0.5, reason='half right')\n"
    )
    assert scored(tmp_path / "r.py", source).reason == "half right"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return row['nope']", "line 2: KeyError: 'nope'"),
        ("return None", "returned None, expected a number or a Verdict"),
        ("return 'yes'", "returned 'yes', expected a number or a Verdict"),
        ("return float('nan')", "returned nan, expected a number, at most 1e+06 in size"),
        ("return float('inf')", "returned inf, expected a number, at most 1e+06 in size"),
    ],
)
def test_what_is_no_number_is_no_verdict(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(RewardError, match="py") as raised:
        scored(tmp_path / f"r{abs(hash(body))}.py", f"def score(response, row):\n    {body}\n")
    assert message in str(raised.value)


def test_a_reward_may_be_written_as_any_module(tmp_path: Path) -> None:
    source = (
        "from dataclasses import dataclass\n\n@dataclass\nclass Part:\n    size: int\n\n"
        "def score(response, row):\n    return Part(size=len(response)).size\n"
    )
    assert scored(tmp_path / "d.py", source).reward == 1.0
    with pytest.raises(RewardError, match="line 2: SystemExit: 3"):
        scored(tmp_path / "e.py", "def score(response, row):\n    raise SystemExit(3)\n")
    with pytest.raises(ValueError, match="line 2: SystemExit: 3"):
        scored(tmp_path / "f.py", "import sys\nsys.exit(3)\n")


def test_an_async_reward_that_waits_is_named(tmp_path: Path) -> None:
    source = "import asyncio\nasync def score(response, row):\n    await asyncio.sleep(1)\n    return 1\n"
    with pytest.raises(RewardError, match="line 3: RuntimeError: no running event loop"):
        scored(tmp_path / "w.py", source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(response, row)\n    return 1\n", "line 1: SyntaxError"),
        ("def scores(response, row):\n    return 1\n", r"it defines no function score\(response, row\)"),
        ("1 / 0\n", "line 1: ZeroDivisionError"),
    ],
)
def test_a_file_that_is_no_reward_is_refused_with_the_row(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scored(tmp_path / f"f{abs(hash(source))}.py", source)
    with pytest.raises(ValueError, match="No such file"):
        VERIFIER.parse_task(ROW, Settings(file=str(tmp_path / "none.py")))
    with pytest.raises(ValueError, match="give REWARD=my_reward"):
        VERIFIER.parse_task(ROW, Settings())
