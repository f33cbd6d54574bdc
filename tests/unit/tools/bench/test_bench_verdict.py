"""The bench's arithmetic, on made-up measurements with ratios worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.generation.serving.requests import AtPush
from recipes.rollouts.group import GroupRequest
from recipes.types import Sampling
from tools.bench.training import SlowWorkers
from tools.bench.verdict import (
    PUSH_NAMES,
    GenerationSpeed,
    Results,
    TrainingTimes,
    breakdown,
    load_warning,
    push_costs,
    push_table,
    rollout_check,
    table,
    training_checks,
    write,
)


def times(max_age: int, latency: float, seconds: list[float]) -> TrainingTimes:
    return TrainingTimes(
        max_age=max_age,
        latency=latency,
        step_seconds=tuple(seconds),
        phase_seconds={"train": tuple(second / 2 for second in seconds)},
        generated_tokens=(10.0,) * len(seconds),
        mismatch=(0.1,) * len(seconds),
    )


@pytest.fixture
def runs() -> list[TrainingTimes]:
    """Seconds per step: 3 and 2 without latency (1.5x); 4 and 2.5 with it (1.6x), in turns a long and a short step."""
    return [
        times(0, 0.0, [3, 3, 30]),
        times(1, 0.0, [2, 2, 1, 3, 2]),
        times(0, 0.5, [4, 4, 4]),
        times(1, 0.5, [4, 1, 4, 1, 4, 9]),
    ]


@pytest.fixture
def ways() -> list[GenerationSpeed]:
    """Three rounds, the last on a machine that got faster: 0.8 and 0.5 of plain, 1.25 and 2 times its time."""
    return [
        GenerationSpeed(name="plain", adds="nothing", tokens_per_second=(900.0, 1000.0, 5000.0)),
        GenerationSpeed(name="logprobs", adds="log-probs", tokens_per_second=(720.0, 800.0, 4500.0)),
        GenerationSpeed(name="ours", adds="ray", tokens_per_second=(450.0, 100.0, 2500.0)),
    ]


def test_step_times_are_compared_by_medians_over_whole_turns_of_the_pipeline(runs: list[TrainingTimes]) -> None:
    without, slow = training_checks(runs)
    assert (without.ratio, without.limit, without.is_kept) == (1.5, 1.1, True)
    assert (slow.ratio, slow.limit, slow.is_kept) == (1.6, 1.8, False)


def test_the_costs_of_the_ways_add_up_to_the_whole_difference(ways: list[GenerationSpeed]) -> None:
    rows = breakdown(ways)
    assert [share for _, share, _ in rows] == [1.0, 0.8, 0.5]
    assert [cost for _, _, cost in rows] == pytest.approx([0.0, 25.0, 75.0])
    check = rollout_check(ways, "ours")
    assert (check.ratio, check.limit, check.is_kept) == (0.5, 0.9, False)


def test_table_and_files_state_the_verdicts(
    runs: list[TrainingTimes], ways: list[GenerationSpeed], tmp_path: Path
) -> None:
    checks = [*training_checks(runs), rollout_check(ways, "ours")]
    text = table(checks, ways)
    assert "async over sync, 0.5 s environment   1.60   1.80  BELOW" in text
    assert "async over sync, 0 s environment     1.50   1.10  ok" in text
    out = tmp_path / "results" / "bench.json"
    pushes = [replace(run, at_push=way) for run in runs[1:2] for way in PUSH_NAMES]
    busy = {"cores": 2.0, "load": 1.5}
    write(out, Results(machine=busy, training=runs, pushes=pushes, rollouts=ways, checks=checks))
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [check["is_kept"] for check in result["checks"]] == [True, False, False]
    assert [run["seconds_per_step"] for run in result["training"]] == [3, 2, 4, 2.5]
    page = out.with_suffix(".html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "load 1.5 on 2 cores" in page
    assert load_warning({"cores": 2.0, "load": 0.9}) == ""
    assert not list(tmp_path.rglob("*.tmp"))


def test_ways_at_a_push_are_compared_with_keeping_within_their_age_and_pass() -> None:
    kept, drained = times(1, 0.0, [2, 2]), replace(times(1, 0.0, [3, 3]), at_push="drain", mismatch=(0.01, 0.03))
    slow_kept, slow_drained = times(1, 0.0, [20, 20]), replace(times(1, 0.0, [40, 40]), at_push="drain")
    other_age = times(2, 0.0, [1, 1])
    costs = push_costs([kept, drained, other_age, slow_kept, slow_drained, kept, drained])
    found = {(cost.max_age, cost.at_push): cost for cost in costs}
    assert found[1, "keep"].ratio == found[2, "keep"].ratio == 1.0
    assert found[1, "drain"].ratio == 1.5  # of 1.5, 2 and 1.5
    assert found[1, "drain"].mismatch == pytest.approx(0.02)
    assert "end before it                   1   3.000     1.50   2.0e-02" in push_table(costs)
    assert set(PUSH_NAMES) == {way.value for way in AtPush}


def test_a_slow_minute_hits_both_sides_of_a_pass(runs: list[TrainingTimes]) -> None:
    fast = [times(0, 0.5, [4]), times(1, 0.5, [2])]  # 2x
    slow = [times(0, 0.5, [40]), times(1, 0.5, [16])]  # 2.5x
    without, slowed = training_checks([*runs, *runs[:2], *fast, *runs[:2], *slow])
    assert without.ratio == 1.5
    assert slowed.ratio == 2.0  # of 1.6, 2 and 2.5


async def test_slow_workers_wait_between_the_stated_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    class Instant:
        async def run_group(self, request: GroupRequest) -> str:
            return f"group {request.affinity}"

    monkeypatch.setattr("tools.bench.training.asyncio.sleep", note)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
    slow = SlowWorkers(Instant(), mean_seconds=0.02, seed=3)
    for num in (1, 50):
        request = GroupRequest(row={}, sampling=sampling, affinity=5, num_rollouts=num)
        for _ in range(200):
            assert await slow.run_group(request) == "group 5"
    assert min(waits) >= 0.2 * 0.02 and max(waits) <= 1.8 * 0.02
    assert 0.017 < sum(waits[:200]) / 200 < 0.023
    assert min(waits[200:]) > 0.02, "a group of fifty waits for its slowest"
