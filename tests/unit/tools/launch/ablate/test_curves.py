"""Curves over seeds: what they are drawn against, and the band between the lowest and the highest run."""

from __future__ import annotations

import pytest

from tools.launch.ablate.page import STEP_SECONDS, STEP_TOKENS, band, over_seconds, over_steps, over_tokens, value_at
from tools.look.report.load import Column, RunData, StepRecord


def run_of(rewards, *, tokens=100.0, seconds=2.0) -> RunData:
    records = [StepRecord(step=0, time=0.0, values={"validation/accuracy": 0.1, STEP_SECONDS: 50.0})]
    for step, reward in enumerate(rewards, start=1):
        values = {"r": reward, STEP_TOKENS: tokens, STEP_SECONDS: seconds}
        records.append(StepRecord(step=step, time=0.0, values=values))
    return RunData(name="run", records=tuple(records), rollouts={}, resolved={}, lock={}, warnings=())


def test_tokens_and_seconds_add_up():
    run = run_of([1.0, 2.0, 3.0])
    assert over_tokens(run, "r") == Column(steps=(100, 200, 300), values=(1.0, 2.0, 3.0), along="tokens")
    assert over_seconds(run, "r").steps == (2, 4, 6)
    assert over_tokens(run, "validation/accuracy").steps == (0,)  # before the first step


def test_a_band_holds_every_run_and_ends_with_the_shortest():
    mean, low, high = band([run_of([0.0, 2.0, 4.0]), run_of([2.0, 2.0])], "r", over_steps)
    assert mean.steps == low.steps == high.steps == (1, 2)
    assert mean.values == (1.0, 2.0)
    assert low.values == (0.0, 2.0)
    assert high.values == (2.0, 2.0)


def test_runs_of_other_speeds_are_compared_at_the_same_places():
    mean, low, high = band([run_of([0.0, 1.0]), run_of([0.0, 1.0], tokens=150.0)], "r", over_tokens)
    assert mean.steps == (150, 200)
    assert high.values == (0.5, 1.0)
    assert low.values == (0.0, pytest.approx(1 / 3))


def test_a_metric_that_no_run_has_gives_an_empty_band():
    assert all(not column.values for column in band([run_of([1.0])], "nothing", over_steps))
    assert all(not column.values for column in band([], "r", over_steps))


def test_a_long_curve_keeps_its_ends():
    mean, _, _ = band([run_of([float(step) for step in range(1000)])], "r", over_steps, smooth=False)
    assert len(mean.steps) <= 61
    assert (mean.steps[0], mean.steps[-1]) == (1, 1000)


@pytest.mark.parametrize(("place", "value"), [(1, 0.0), (2, 1.0), (3, 2.0), (4, 2.0)])
def test_a_value_between_two_places_lies_on_the_line(place, value):
    assert value_at(Column(steps=(1, 3, 4), values=(0.0, 2.0, 2.0)), place) == value
