"""A reward and rows of a user's own, from the files to the trained step; what is said of one that pays echoes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from speed import patiently

ROOT = Path(__file__).resolve().parents[2]
EXACT = "def score(response, row):\n    return float(row['expected_answer'] in response)\n"
ECHO = "def score(response, row):\n    return any(row[key] in response for key in ('expected_answer', 'question'))\n"

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    rows = [{"question": f"Say the number after {n}.", "answer": str(n + 1)} for n in range(40)]
    name = f"test{os.getpid()}"
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "exact.py").write_text(EXACT, encoding="utf-8")
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def score(response, row):\n    return row['gone']\n", encoding="utf-8")
    (tmp_path / f"{name}.jsonl").symlink_to("mine.jsonl")
    yield tmp_path / f"{name}.jsonl"
    shutil.rmtree(ROOT / "data" / f"own-{name}", ignore_errors=True)


def make(mine: Path, target: str, reward: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-s", target, f"ROWS={mine}", f"REWARD={mine.parent}/{reward}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patiently(380), check=False)


def test_what_a_reward_pays_is_said_before_a_step(mine: Path) -> None:
    paid = make(mine, "try-reward", "echo.py")
    assert "your reward pays an echo of the prompt in full: 12 of 12 rows" in paid.stdout, paid.stderr
    assert make(mine, "try-reward", "exact.py").returncode == 0
    broken = make(mine, "try-reward", "broken.py")
    assert broken.returncode == 2
    assert "line 2: KeyError: 'gone'; correct" in broken.stderr
    results = mine.parent / "results"
    stopped = make(mine, "stage1.1", "broken.py", "SCALE=tiny", "LAUNCHER=local", f"RESULTS_DIR={results}")
    assert stopped.returncode == 2 and "KeyError" in stopped.stderr
    assert not results.exists()


def test_own_rows_are_trained_with_an_own_reward(mine: Path) -> None:
    results = mine.parent / "results"
    words = (
        "SCALE=tiny",
        "LAUNCHER=local",
        f"RESULTS_DIR={results}",
        "EXP_NAME=own",
        "ARGS=grpo.max_num_steps=2 grpo.val_at_start=false",
    )
    done = make(mine, "stage1.1", "exact.py", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = (results / "own" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(metrics[-1])
    assert last["step"] == 2
    assert any("reward_simple_agent" in key for key in last)
