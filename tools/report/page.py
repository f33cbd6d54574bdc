"""Assembles the page: summary, curves, tables, samples and provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from recipes.grpo.metrics import PHASES
from tools.report import summary
from tools.report.chart import Series, line_chart, stacked_chart
from tools.report.load import Column, RunData
from tools.report.samples import samples
from tools.report.trajectory import trajectories
from tools.report.unjudged import unjudged_table

STYLE_FILE = Path(__file__).with_name("report.css")
MAX_NON_FINITE = 8  # steps listed per metric


def render(run: RunData, *, min_gain: float | None = None) -> str:
    """Return the whole page; `min_gain` is the held-out gain that the verdict asks for."""
    body = [
        summary.header(run, min_gain=min_gain),
        _warnings(run),
        summary.tiles(run),
        f'<section class="charts">{"".join(_charts(run))}</section>',
        summary.validation_table(run),
        summary.shares(run),
        summary.status_table(run),
        unjudged_table(run.unjudged, str(run.setting("data.train.data_path") or "")),
        samples(run),
        trajectories(run),
        _provenance(run),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}: run report</title><style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _charts(run: RunData) -> Iterator[str]:
    yield _reward_chart(run)
    yield _agent_chart(run)
    yield from _off_policy_charts(run)
    yield _phase_chart(run)
    yield line_chart(
        "Speed",
        [
            Series(
                label="generation",
                column=run.column("performance/generation_tokens_per_sec"),
                color=0,
                is_smoothed=True,
            ),
            Series(label="training", column=run.column("performance/train_tokens_per_sec"), color=1, is_smoothed=True),
        ],
        unit="tokens/s",
        include=(0.0,),
    )
    yield line_chart(
        "Answer length",
        [
            Series(label="mean", column=run.column("train/gen_tokens_per_sample/mean"), color=0, is_smoothed=True),
            Series(
                label="longest",
                column=run.column("train/gen_tokens_per_sample/max"),
                color=3,
                is_dashed=True,
                is_smoothed=True,
            ),
        ],
        unit="tokens",
        include=(0.0,),
    )
    yield line_chart(
        "Optimizer",
        [
            Series(label="gradient norm", column=run.column("train/grad_norm"), color=0, is_smoothed=True),
            Series(label="|loss|", column=_absolute(run.column("train/loss")), color=1, is_smoothed=True),
        ],
        unit="log scale",
        is_log=True,
    )


def _off_policy_charts(run: RunData) -> Iterator[str]:
    yield line_chart(
        "Engine and policy log-probabilities",
        [
            Series(label="largest gap", column=run.column("train/logprob_error_max"), color=3, is_smoothed=True),
            Series(
                label="mean exp|gap| - 1",
                column=_minus_one(run.column("train/token_mult_prob_error")),
                color=0,
                is_smoothed=True,
            ),
        ],
        unit="nats, log scale",
        is_log=True,
        note="The policy has its current weights, so a lag of one refit is included.",
    )
    yield line_chart(
        "Trajectory age",
        [
            Series(label="oldest group", column=run.column("train/max_trajectory_age"), color=3, is_dashed=True),
            Series(label="mean of groups", column=run.column("train/avg_trajectory_age"), color=0),
            Series(label="mean of tokens", column=run.column("train/token_age/mean"), color=2),
        ],
        unit="weight versions",
        include=(0.0, 1.0),
        note="Tokens are younger than their group when a refit came while the group was generated.",
    )


def _reward_chart(run: RunData) -> str:
    series = [
        Series(label="training", column=run.column("train/reward"), color=0, is_smoothed=True),
        Series(label="held-out, sampled", column=run.column("validation/accuracy"), color=1, has_points=True),
        Series(
            label="held-out, greedy",
            column=run.column("validation/greedy_accuracy"),
            color=2,
            has_points=True,
            is_dashed=True,
        ),
    ]
    return line_chart("Reward", series, unit="mean of valid rollouts", include=(0.0,))


def _agent_chart(run: RunData) -> str:
    agents = run.agents("validation/", "/accuracy")
    is_validation = bool(agents)
    if is_validation:
        title, prefix, suffix = "Held-out reward per environment", "validation/", "/accuracy"
    else:
        title, prefix, suffix = "Training reward per environment", "train/", "/reward"
        agents = run.agents(prefix, suffix)
    series = [
        Series(label=agent, column=run.column(f"{prefix}{agent}{suffix}"), color=color % 8, has_points=is_validation)
        for color, agent in enumerate(agents)
    ]
    return line_chart(title, series, unit="mean", include=(0.0,))


def _phase_chart(run: RunData) -> str:
    steps = summary.trained(run)
    per_step = [summary.phase_seconds(record) for record in steps]
    names = [*(name for name in PHASES.values() if name != "wait"), "other", "wait"]  # waiting is drawn on top, in grey
    parts = {name: [seconds.get(name, 0.0) for seconds in per_step] for name in names}
    return stacked_chart(
        "Seconds per step",
        [record.step for record in steps],
        parts,
        unit="s, legend: mean",
        note="wait: the policy waits for rollouts.",
    )


def _minus_one(column: Column) -> Column:
    return Column(steps=column.steps, values=tuple(value - 1.0 for value in column.values))


def _absolute(column: Column) -> Column:
    return Column(steps=column.steps, values=tuple(abs(value) for value in column.values))


def _warnings(run: RunData) -> str:
    messages = list(run.warnings)
    bad: dict[str, list[int]] = {}
    for record in run.records:
        for key in record.non_finite:
            bad.setdefault(key, []).append(record.step)
    for key, steps in sorted(bad.items()):
        shown = ", ".join(map(str, steps[:MAX_NON_FINITE])) + (" ..." if len(steps) > MAX_NON_FINITE else "")
        messages.append(f"{key} was not a finite number at step {shown}")
    if not messages:
        return ""
    return f'<ul class="warnings">{"".join(f"<li>{escape(message)}</li>" for message in messages)}</ul>'


def _provenance(run: RunData) -> str:
    """Return run.lock.json as a table, and the resolved configuration folded."""
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td><code>{escape(value)}</code></td></tr>" for key, value in _lock_rows(run.lock)
    )
    table = f"<div class='scroll'><table class='lock'>{rows}</table></div>" if rows else ""
    folded = _folded("resolved configuration", run.resolved) if run.resolved else ""
    return f"<section><h2>Provenance</h2>{table}{folded}</section>" if table or folded else ""


def _lock_rows(lock: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every leaf; all packages are one row."""
    for key, value in lock.items():
        if key == "packages" and isinstance(value, Mapping):
            yield key, ", ".join(f"{name} {version}" for name, version in value.items())
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{name}", text) for name, text in _lock_rows(value))
        elif value not in ("", None):
            yield key, str(value)


def _folded(title: str, value: Mapping[str, Any]) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    head = f"{escape(title)} <small>{len(value)} entries</small>"
    return f"<details><summary>{head}</summary><pre class='json'>{escape(text)}</pre></details>"
