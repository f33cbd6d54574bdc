"""Which prompt is sampled next: in the stream's order, and none of an environment that gives no verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.config.tree import CircuitBreakerConfig
from recipes.errors import RunError
from recipes.grpo.data import CircuitBreaker, PromptDataset, PromptQueue, PromptStream
from recipes.types import Group, PromptRef, Rollout, RolloutStatus
from tests.groups import group_of
from tests.unit.grpo.loop_case import make_run, write_rows

CFG = CircuitBreakerConfig(window_rollouts=4, max_no_verdict_share=0.5, probe_seconds=10.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(CFG, clock=clock), clock


def test_pauses_above_the_share_over_a_full_window_only() -> None:
    got, _ = breaker()
    got.record("math", [False, False, False])
    assert not got.is_paused("math"), "three rollouts say too little"
    got.record("math", [True])
    assert got.is_paused("math")  # 3 of 4
    for verdicts in ([True, False], [False, True]):
        got.record("code", verdicts)
    assert not got.is_paused("code"), "half is the limit itself"
    got.record("code", [False])  # the oldest, a verdict, leaves the window: 3 of 4
    assert got.is_paused("code")
    assert got.shares() == {"math": 0.75, "code": 0.75}


def test_a_probe_is_due_once_per_period_and_a_verdict_resumes() -> None:
    got, clock = breaker()
    got.record("math", [False] * 4)
    assert (got.takes_probe("math"), got.seconds_to_probe(["math", "code"])) == (False, 10.0)
    assert got.seconds_to_probe(["code"]) is None
    clock.now += 10
    assert [got.takes_probe("math"), got.takes_probe("math")] == [True, False]
    got.record("math", [False, False])
    assert got.paused() == {"math": 10.0}
    got.record("math", [True, False])
    assert got.paused() == {}
    assert got.seconds_to_probe(["math"]) is None
    assert not got.takes_probe("math")
    got.record("math", [False, False, False])
    assert not got.is_paused("math"), "what was before the pause does not count after it"


def queue(path: Path, names: list[str]) -> tuple[PromptQueue, Clock]:
    stream = PromptStream(PromptDataset(write_rows(path / "rows.jsonl", names)), num_epochs=1, shuffle=False, seed=0)
    got, clock = breaker()
    return PromptQueue(stream, got, prompts_per_step=2, window=2), clock


def group(agent: str, verdicts: list[bool], row: int = 0) -> Group:
    rollouts = tuple(
        Rollout(turns=(), status=RolloutStatus.COMPLETED, reason="", reward=1.0 if has_one else None)
        for has_one in verdicts
    )
    ref = PromptRef(epoch=0, row_index=row, prompt_id="p")
    return group_of(rollouts, prompt=ref, agent=agent)


def draw(got: PromptQueue, count: int) -> list[int | None]:
    return [None if (drawn := got.next()) is None else drawn[0] for _ in range(count)]


def test_prompts_of_a_paused_environment_wait_and_come_first_when_it_is_back(tmp_path: Path) -> None:
    got, clock = queue(tmp_path, ["a:0", "b:1", "a:2", "b:3", "a:4", "b:5", "a:6", "b:7"])
    assert draw(got, 2) == [0, 1]
    got.record(group("a", [False] * 4))
    assert got.give_back(0, group("a", [False] * 4), "down") is False
    assert draw(got, 2) == [3, 5]
    assert (got.set_aside(), got.failed) == ((0, 2, 4), [])
    clock.now += 10
    assert draw(got, 2) == [0, 7], "one prompt tries the environment, the rest goes on"
    got.record(group("a", [True, True]))
    assert draw(got, 4) == [2, 4, 6, None]


def test_prompts_that_failed_before_the_pause_wait_too(tmp_path: Path) -> None:
    got, _ = queue(tmp_path, ["a:0", "a:1", "a:2", "a:3"])
    assert draw(got, 3) == [0, 1, 2]
    for position in (0, 1, 2):
        one = replace(group("a", [False, False]), prompt=PromptRef(epoch=0, row_index=position, prompt_id="p"))
        got.record(one)
        got.give_back(position, one, "down")
    # The window is two prompts: it was full with the second, which then waited, as did the third.
    assert (got.set_aside(), got.failed) == ((0, 1, 2), [])


def test_a_prompt_that_fails_alone_has_failed(tmp_path: Path) -> None:
    got, _ = queue(tmp_path, ["a:0", "a:1"])
    one = group("a", [False, False])
    got.record(one)
    assert got.give_back(0, one, "down") is True
    assert (got.set_aside(), got.failed) == ((), [(one.prompt, "down")])


def test_rows_of_a_paused_environment_are_not_read_to_the_end(tmp_path: Path) -> None:
    got, _ = queue(tmp_path, [f"a:{number}" for number in range(100)])
    got.record(group("a", [False] * 4))
    assert got.next() is None
    assert got.position == 8, "four steps of two prompts"


@pytest.mark.parametrize("position", [0, 3])
def test_what_waited_is_tried_after_a_restore(tmp_path: Path, position: int) -> None:
    got, _ = queue(tmp_path, [f"a:{number}" for number in range(6)])
    got.restore(position, skipped=(4,), set_aside=(2, 1))
    assert draw(got, 3) == [1, 2, position]


def test_what_the_engine_gave_up_neither_pauses_nor_resumes_an_environment(tmp_path: Path) -> None:
    got, clock = queue(tmp_path, [f"a:{number}" for number in range(6)])
    failed = group("a", [False] * 4)
    aborted = replace(failed, rollouts=tuple(replace(one, status=RolloutStatus.ABORTED) for one in failed.rollouts))
    got.record(aborted)
    assert not got.breaker.is_paused("a")
    got.record(failed)
    assert got.breaker.is_paused("a")
    clock.now += 10
    got.record(aborted)
    assert got.breaker.is_paused("a")


def test_a_data_file_that_is_cut_short_during_the_run_ends_it_with_that_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["long" * 5000] * 4)  # more than what is read at once
    (tmp_path / "train.jsonl").write_bytes(b"")
    try:
        run.collector.start(version=0, last_step=1)
        with pytest.raises(RunError, match=r"train\.jsonl: row 1 is not what it was when the run began"):
            run.buffer.take(0, deadline_seconds=30.0, waiting_for=run.collector.waiting_for)
    finally:
        run.close()
