"""The page of an ablation: a table of all variants, and a section of curves for each question.

Curves with a band: the runs of one variant, which differ in their seed, as one mean and its range.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from tools.launch.ablate.variants import BASELINE, Variant
from tools.look.report.chart import Series, format_number, format_seconds, line_chart, page, part, running_mean
from tools.look.report.load import Column, RunData
from tools.look.report.page import GREEDY, SAMPLED, gain_of

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


Runs = Mapping[Variant, Mapping[int, RunData]]
"""Variant -> seed -> what its run has logged; in the order of the ablation."""

REWARD, MISMATCH, LENGTH = "train/reward", "train/token_mult_prob_error", "train/gen_tokens_per_sample/mean"
CHARTS = (
    ("Training reward against tokens", REWARD, over_tokens),
    ("Training reward against seconds", REWARD, over_seconds),
    ("Difference of engine and policy", MISMATCH, over_steps),
    ("Tokens per answer", LENGTH, over_steps),
)
LAST = 5  # steps of which a run's last reward, mismatch and length are the mean
COLUMNS = (
    *("variant", "seeds", "held-out", "against the stage", "greedy", "last reward", "mismatch"),
    *("tokens per answer", "tokens", "time"),
)
BASELINE_COLOR = 8  # grey


def render(title: str, runs: Runs, *, num_seeds: int, notes: Sequence[str] = ()) -> str:
    """Return the whole page; `notes` say what is missing."""
    body = [_header(title, runs, num_seeds), part("page", "warnings", messages=notes), _table(runs)]
    body += [_section(question, variants, runs) for question, variants in _questions(runs).items()]
    return page(f"{title}: ablation", body)


def _questions(runs: Runs) -> dict[str, list[Variant]]:
    questions: dict[str, list[Variant]] = {}
    for variant in runs:
        if variant != BASELINE:
            questions.setdefault(variant.question, []).append(variant)
    return questions


def _header(title: str, runs: Runs, num_seeds: int) -> Markup:
    done = sum(len(by_seed) for by_seed in runs.values())
    facts = [f"{len(runs)} variants", f"{num_seeds} seeds each", f"{done} runs"]
    return part("page", "header", kicker="Super RL recipe: ablation", title=title, facts=facts)


def _table(runs: Runs) -> Markup:
    base = runs.get(BASELINE, {})
    rows = []
    for variant, by_seed in runs.items():
        own = list(by_seed.values())
        cells = [
            _spread([value for run in own if (value := _after(run, SAMPLED)) is not None]),
            _difference(by_seed, base) if variant != BASELINE else "",
            _spread([value for run in own if (value := _after(run, GREEDY)) is not None]),
            *(_spread(_last(own, metric)) for metric in (REWARD, MISMATCH, LENGTH)),
            _mean_sum(own, STEP_TOKENS, format_number),
            _mean_sum(own, STEP_SECONDS, format_seconds),
        ]
        rows.append((variant.name, len(own), *cells))
    note = (
        "Mean and standard deviation over seeds. Held-out: reward of sampled answers to held-out rows after the last "
        "step. Against the stage: mean difference to its run with the same seed, and how many seeds agree in its sign. "
        f"Last reward, mismatch (mean exp|engine - trainer| of the log-probabilities) and length: last {LAST} steps."
    )
    return part(
        "page", "section", title="All variants", body=part("page", "table", heads=COLUMNS, rows=rows), note=note
    )


def _after(run: RunData, metric: str) -> float | None:
    gain = gain_of(run, metric)
    return gain.after if gain and gain.first_step < gain.last_step else None


def _last(runs: Sequence[RunData], metric: str) -> list[float]:
    columns = [run.column(metric).values[-LAST:] for run in runs]
    return [statistics.fmean(values) for values in columns if values]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "not measured"
    shown = format_number(statistics.fmean(values))
    return f"{shown} ± {format_number(statistics.stdev(values), digits=2)}" if len(values) > 1 else shown


def _difference(by_seed: Mapping[int, RunData], base: Mapping[int, RunData]) -> str:
    """Return the mean difference of the held-out reward to the run of the stage with the same seed."""
    pairs = [(_after(by_seed[seed], SAMPLED), _after(base[seed], SAMPLED)) for seed in by_seed if seed in base]
    differences = [own - other for own, other in pairs if own is not None and other is not None]
    if not differences:
        return "not measured"
    mean = statistics.fmean(differences)
    agreeing = sum(difference * mean > 0 for difference in differences)
    return f"{mean:+.3f} ({agreeing} of {len(differences)})"


def _mean_sum(runs: Sequence[RunData], metric: str, shown: Callable[[float], str]) -> str:
    columns = [run.column(metric) for run in runs]
    pairs = [list(zip(column.steps, column.values, strict=True)) for column in columns if column.values]
    sums = [sum(value for step, value in own if step) for own in pairs]
    return shown(statistics.fmean(sums)) if sums else "not measured"


def _section(question: str, variants: Sequence[Variant], runs: Runs) -> Markup:
    shown = [variant for variant in (*variants, BASELINE) if runs.get(variant)]
    return part("page", "charts", title=question, drawn=Markup("".join(_charts(shown, runs))))


def _charts(variants: Sequence[Variant], runs: Runs) -> Iterator[str]:
    note = "Line: mean over seeds. Band: lowest to highest. As far as every seed has come."
    for number, (title, metric, against) in enumerate(CHARTS):
        bands = [band(_of(runs, variant), metric, against) for variant in variants]
        yield _chart(title, bands, variants, note=note if number == 0 else "")


def _of(runs: Runs, variant: Variant) -> list[RunData]:
    return list(runs[variant].values())


def _chart(title: str, bands: Sequence[Band], variants: Sequence[Variant], *, note: str) -> str:
    colors = [BASELINE_COLOR if variant == BASELINE else number % 8 for number, variant in enumerate(variants)]
    series = [
        Series(label=variant.name, column=mean, color=color, is_dashed=variant == BASELINE, limits=(low, high))
        for variant, color, (mean, low, high) in zip(variants, colors, bands, strict=True)
    ]
    return line_chart(title, series, note=note)
