"""Curves with a band: the runs of one variant, which differ in their seed, as one mean and its range."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from tools.report.chart import running_mean
from tools.report.load import Column, RunData

POINTS = 60  # of one curve
WINDOW = 5  # steps of the running mean of noisy metrics
STEP_SECONDS, STEP_TOKENS = "timing/train/total_step_time", "train/total_num_tokens"

Band = tuple[Column, Column, Column]
"""Mean, lowest and highest value over the runs, at the same places."""


def over_steps(run: RunData, metric: str) -> Column:
    """Return a metric against the step."""
    return run.column(metric)


def over_tokens(run: RunData, metric: str) -> Column:
    """Return a metric against the tokens trained on so far, prompts included."""
    return _over_sum(run, metric, STEP_TOKENS, "tokens")


def over_seconds(run: RunData, metric: str) -> Column:
    """Return a metric against the seconds of all training steps so far, without the time between two starts."""
    return _over_sum(run, metric, STEP_SECONDS, "seconds")


def _over_sum(run: RunData, metric: str, amount: str, along: str) -> Column:
    column, amounts = run.column(metric), run.column(amount)
    own = [value if step else 0.0 for step, value in zip(amounts.steps, amounts.values, strict=True)]  # 0: no training
    totals = list(itertools.accumulate(own))
    places = []
    for step in column.steps:
        index = bisect_right(amounts.steps, step)
        places.append(round(totals[index - 1]) if index else 0)
    return Column(steps=tuple(places), values=column.values, along=along)


def band(
    runs: Sequence[RunData], metric: str, against: Callable[[RunData, str], Column], *, smooth: bool = True
) -> Band:
    """Return mean and range of a metric over runs, at the same places: as far as all of them have come."""
    columns = [against(run, metric) for run in runs]
    columns = [_smoothed(column) if smooth else column for column in columns if column.values]
    nothing = Column(steps=(), values=())
    if not columns:
        return nothing, nothing, nothing
    first, last = max(column.steps[0] for column in columns), min(column.steps[-1] for column in columns)
    known = sorted({place for column in columns for place in column.steps if first <= place <= last})
    places = tuple(known[:: -(-len(known) // POINTS)]) if known else ()
    if known and places[-1] != known[-1]:
        places += (known[-1],)
    rows = [[value_at(column, place) for column in columns] for place in places]
    means = tuple(sum(row) / len(row) for row in rows)
    mean = Column(steps=places, values=means, along=columns[0].along)
    return mean, replace(mean, values=tuple(map(min, rows))), replace(mean, values=tuple(map(max, rows)))


def value_at(column: Column, place: int) -> float:
    """Return a column's value at a place between its first and its last one, on the line between its neighbours."""
    right = bisect_right(column.steps, place)
    if right == len(column.steps):
        return column.values[-1]
    left = max(right - 1, 0)
    start, end = column.steps[left], column.steps[right]
    share = (place - start) / (end - start)
    return column.values[left] + share * (column.values[right] - column.values[left])


def _smoothed(column: Column) -> Column:
    if len(column.values) < 2 * WINDOW:
        return column
    return replace(column, values=tuple(running_mean(column.values, WINDOW)))
