"""The page of an ablation: a table of all variants, and a section of curves for each question."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from tools.ablate.curves import STEP_SECONDS, STEP_TOKENS, Band, band, over_seconds, over_steps, over_tokens
from tools.ablate.variants import BASELINE, Variant
from tools.report.axis import format_number, format_seconds
from tools.report.chart import Series, line_chart
from tools.report.load import RunData
from tools.report.page import STYLE_FILE
from tools.report.summary import GREEDY, SAMPLED, gain_of

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
    style = STYLE_FILE.read_text(encoding="utf-8")
    body = [_header(title, runs, num_seeds, notes), _table(runs)]
    body += [_section(question, variants, runs) for question, variants in _questions(runs).items()]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: ablation</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _questions(runs: Runs) -> dict[str, list[Variant]]:
    questions: dict[str, list[Variant]] = {}
    for variant in runs:
        if variant != BASELINE:
            questions.setdefault(variant.question, []).append(variant)
    return questions


def _header(title: str, runs: Runs, num_seeds: int, notes: Sequence[str]) -> str:
    done = sum(len(by_seed) for by_seed in runs.values())
    facts = f"<span>{len(runs)} variants</span><span>{num_seeds} seeds each</span><span>{done} runs</span>"
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    warnings = f'<ul class="warnings">{lines}</ul>' if notes else ""
    return (
        f'<header><p class="kicker">Super RL recipe: ablation</p><h1>{escape(title)}</h1>'
        f'<p class="facts">{facts}</p></header>{warnings}'
    )


def _table(runs: Runs) -> str:
    base = runs.get(BASELINE, {})
    names = (
        "variant",
        "seeds",
        "held-out",
        "against the stage",
        "greedy",
        "last reward",
        "mismatch",
        "tokens per answer",
    )
    head = "".join(f"<th>{name}</th>" for name in (*names, "tokens", "time"))
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
        row = f"<td>{escape(variant.name)}</td><td>{len(own)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr>{row}</tr>")
    note = (
        "Mean and standard deviation over seeds. Held-out: reward of sampled answers to held-out rows after the last "
        "step. Against the stage: mean difference to its run with the same seed, and how many seeds agree in its sign. "
        f"Last reward, mismatch (mean exp|engine - trainer| of the log-probabilities) and length: last {LAST} steps."
    )
    return (
        f"<section><h2>All variants</h2><div class='scroll'><table class='numbers'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class='note'>{note}</p></section>"
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


def _section(question: str, variants: Sequence[Variant], runs: Runs) -> str:
    shown = [variant for variant in (*variants, BASELINE) if runs.get(variant)]
    return f'<section><h2>{escape(question)}</h2><div class="charts">{"".join(_charts(shown, runs))}</div></section>'


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
