"""The profile's ledger: what a kill leaves is used, what measured something else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.errors import DataError
from recipes.grpo.metrics import kind_of, profile_entry
from recipes.types import Rollout, RolloutStatus, Turn, VersionSpan
from tools.data.curriculum.profile import RESULT, ProfileLedger

KNOWN = {"tool": "profile", "parameters": {"samples": 2, "model": {"weights_sha256": "a"}}}
KNOWN_ROWS = f".{RESULT}.known"


def rollout(reward: float | None, tokens: int = 3) -> Rollout:
    turn = Turn(
        prompt_token_ids=(1,),
        token_ids=(5,) * tokens,
        logprobs=(0.0,) * tokens,
        versions=(VersionSpan(version=0, start=0, end=tokens),),
        finish_reason="stop",
    )
    status = RolloutStatus.ENV_FAILED if reward is None else RolloutStatus.COMPLETED
    return Rollout(turns=(turn,), status=status, reason="because", reward=reward)


def entry(line: int, *rewards: float | None) -> dict[str, object]:
    return profile_entry(line, f"id{line}", "agent", [rollout(reward) for reward in rewards], pass_reward=1.0)


def test_an_answer_without_a_verdict_counts_for_nothing() -> None:
    assert entry(4, 1.0, 0.5, 0.0, None) == {
        "line": 4,
        "row_id": "id4",
        "agent": "agent",
        "pass_rate": pytest.approx(1 / 3),
        "mean_reward": 0.5,
        "num_samples": 4,
        "num_scored": 3,
        "mean_tokens": 3.0,
        "kept_out": {"env_failed: because": 1},
    }
    failed = entry(5, None, None)
    assert (failed["pass_rate"], failed["reason"]) == (None, "because")


def test_what_is_kept_out_of_the_loss_is_counted_by_kind() -> None:
    late = replace(rollout(0.0), is_flagged=True, reason="the hidden tests ran out of their time: test_a, test_b")
    again = replace(late, reason="the hidden tests ran out of their time: test_c")
    long = replace(rollout(None), reason="x" * 5000)
    line = profile_entry(1, "id1", "agent", [rollout(1.0), late, again, long])
    assert line["kept_out"] == {"flagged: the hidden tests ran out of their time": 2, f"env_failed: {'x' * 120}": 1}


LIMIT = "scoring used more than 30 s of processor time"


@pytest.mark.parametrize(
    ("reasons", "kind"),
    [
        ((f"mcqa: {LIMIT}",), f"mcqa: {LIMIT}"),
        ((f"env_failed: mcqa: {LIMIT}",), f"env_failed: mcqa: {LIMIT}"),
        (("mcqa: no score within 600 s",), "mcqa: no score within 600 s"),
        (("mcqa: MemoryError: a", "mcqa: MemoryError"), "mcqa: MemoryError"),
        (("mcqa: TypeError: 'a' is none", "mcqa: TypeError: 'b' is none"), "mcqa: TypeError"),
        (
            (
                "mcqa: the scoring process died (exit status -9: x) (3 attempts)",
                "mcqa: the scoring process died (exit status 1)",
            ),
            "mcqa: the scoring process died",
        ),
        (
            ("mcqa: its libraries could not be loaded: no a", "mcqa: its libraries could not be loaded: no b"),
            "mcqa: its libraries could not be loaded",
        ),
        (
            ("ours: http://10.0.0.1:80: no reply: a", "ours: http://10.0.0.1:80: no reply: b"),
            "ours: http://10.0.0.1:80: no reply",
        ),
        (("the agent ended with status 1: a b", "the agent ended with status 1: c"), "the agent ended with status 1"),
        (("",), ""),
    ],
)
def test_a_kind_of_failure_is_what_happened_and_to_whom(reasons: tuple[str, ...], kind: str) -> None:
    assert {kind_of(reason) for reason in reasons} == {kind}


def test_rows_survive_a_kill_and_a_broken_line_does_not(tmp_path: Path) -> None:
    ledger = ProfileLedger.open(tmp_path, KNOWN)
    ledger.add(entry(2, 1.0))
    ledger.add(entry(1, 0.0))
    with (tmp_path / KNOWN_ROWS).open("ab") as file:
        file.write(b'{"line": 3, "pass_')  # killed here
    again = ProfileLedger.open(tmp_path, KNOWN)
    assert sorted(again.entries) == [1, 2]
    again.add(entry(3, None))
    assert sorted(ProfileLedger.open(tmp_path, KNOWN).entries) == [1, 2]  # without a verdict: another chance
    counts = again.finish(KNOWN)
    assert counts == {"rows": 3, "without_verdict": 1, "always_solved": 1, "never_solved": 1}
    lines = [json.loads(line) for line in (tmp_path / RESULT).read_text(encoding="utf-8").splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3]
    assert not (tmp_path / KNOWN_ROWS).exists()


def test_a_finished_profile_goes_on_with_its_failed_rows(tmp_path: Path) -> None:
    ledger = ProfileLedger.open(tmp_path, KNOWN)
    ledger.add(entry(1, 1.0))
    ledger.add(entry(2, None))
    ledger.finish(KNOWN)
    second = ProfileLedger.open(tmp_path, KNOWN)
    assert list(second.entries) == [1]
    assert not second.is_finished(2)
    second.add(entry(2, 0.0))
    third = ProfileLedger.open(tmp_path, KNOWN)  # killed before the second end
    assert sorted(third.entries) == [1, 2]
    assert not third.is_finished(2)  # all is known, and the result does not say it
    assert third.finish(KNOWN)["without_verdict"] == 0
    assert ProfileLedger.open(tmp_path, KNOWN).is_finished(2)


def test_an_end_that_fails_loses_no_row(tmp_path: Path) -> None:
    ledger = ProfileLedger.open(tmp_path, KNOWN)
    ledger.add(entry(1, 1.0))
    (tmp_path / RESULT).mkdir()  # nothing can take its name
    with pytest.raises(IsADirectoryError):
        ledger.finish(KNOWN)
    assert sorted(ProfileLedger.open(tmp_path, KNOWN).entries) == [1]


def test_another_measurement_is_refused_by_name(tmp_path: Path) -> None:
    ProfileLedger.open(tmp_path, KNOWN)
    other = {"tool": "profile", "parameters": {"samples": 4, "model": {"weights_sha256": "b"}}}
    with pytest.raises(DataError, match=r"model\.weights_sha256 was a, is b; parameters\.samples was 2, is 4"):
        ProfileLedger.open(tmp_path, other)
