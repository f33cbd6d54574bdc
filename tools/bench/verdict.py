"""What the bench concludes: ratios against limits, as a table for people, JSON for machines, and one plot."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from recipes.grpo.metrics import PHASES
from tools.report.axis import format_number
from tools.report.chart import stacked_chart
from tools.report.page import STYLE_FILE

LIMITS: Mapping[float, float] = {0.0: 1.1, 0.5: 1.8}
"""Mean environment latency in seconds -> how many times faster an asynchronous step must be."""
ROLLOUT_LIMIT = 0.85  # of plain vLLM's tokens per second
SPLIT_LIMIT = 0.8  # of the speed of cat into a file and sha256sum together
FILL_LIMIT, VALIDATE_LIMIT = 1.1, 1.5  # times one process's speed, from two cores on
FILL_MEMORY_LIMIT = 0.8  # of the memory on a tenth of the rows over that on all: it does not grow with the file


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """Measured steps of one way to train, without those that warm up."""

    max_age: int  # grpo.async_grpo.max_trajectory_age_steps; 0 is synchronous
    latency: float  # mean seconds an environment takes per rollout, added to what it takes anyway
    step_seconds: tuple[float, ...]
    phase_seconds: Mapping[str, tuple[float, ...]]  # short name of the phase -> one value per step
    generated_tokens: tuple[float, ...]  # per sample, mean of the step

    @property
    def name(self) -> str:
        return f"{'async' if self.max_age else 'sync'}, {self.latency:g} s"

    @property
    def seconds_per_step(self) -> float:
        """The median, over all max_age + 1 consecutive steps, of their mean.

        The max_age + 1 batches of the pipeline take turns: when environments are slow, a step that waits is followed
        by steps that do not, and the median of single steps would be one or the other by chance.
        """
        width = min(self.max_age + 1, len(self.step_seconds))
        windows = zip(*(self.step_seconds[start:] for start in range(width)), strict=False)
        return statistics.median(statistics.fmean(window) for window in windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to generate the same samples; each rung adds something to the one before."""

    name: str
    adds: str
    tokens_per_second: tuple[float, ...]  # one value per round

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One ratio and the limit it has to reach."""

    name: str
    ratio: float
    limit: float
    detail: str

    @property
    def is_kept(self) -> bool:
        return self.ratio >= self.limit


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median over the rounds of their own ratios: a slow minute hits both sides of a round."""
    return statistics.median(above / below for above, below in zip(over, under, strict=True))


def training_checks(runs: Sequence[TrainingTimes]) -> list[Check]:
    """Compare asynchronous with synchronous steps at every latency: the median over the passes of their ratio."""
    checks = []
    for latency, limit in LIMITS.items():
        sync, overlapped = (
            [run.seconds_per_step for run in runs if (run.max_age > 0, run.latency) == (is_async, latency)]
            for is_async in (False, True)
        )
        checks.append(
            Check(
                name=f"async over sync, {latency:g} s environment",
                ratio=median_ratio(sync, overlapped),
                limit=limit,
                detail=f"{statistics.median(sync):.3f} s -> {statistics.median(overlapped):.3f} s per step",
            )
        )
    return checks


def rollout_check(rungs: Sequence[Rung], ours: str) -> Check:
    """Compare the rung named `ours` with the first one, plain vLLM."""
    plain = rungs[0]
    mine = next(rung for rung in rungs if rung.name == ours)
    return Check(
        name=f"{ours} over {plain.name}",
        ratio=median_ratio(mine.tokens_per_second, plain.tokens_per_second),
        limit=ROLLOUT_LIMIT,
        detail=f"{format_number(plain.median)} -> {format_number(mine.median)} tokens/s",
    )


def breakdown(rungs: Sequence[Rung]) -> list[tuple[Rung, float, float]]:
    """Return (rung, its share of the first one's speed, what it costs per token over the rung before, in percent).

    The cost is of the first rung's time per token, so that the costs of all rungs add up.
    """
    before, rows = 1.0, []
    for rung in rungs:
        share = median_ratio(rung.tokens_per_second, rungs[0].tokens_per_second)
        rows.append((rung, share, 100.0 * (1.0 / share - before)))
        before = 1.0 / share
    return rows


def table(checks: Sequence[Check], rungs: Sequence[Rung]) -> str:
    """Return the verdicts and the breakdown as aligned text."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'what':<{width}}  ratio  limit  verdict  measured"]
    for check in checks:
        verdict = "ok" if check.is_kept else "BELOW"
        lines.append(f"{check.name:<{width}}  {check.ratio:5.2f}  {check.limit:5.2f}  {verdict:<7}  {check.detail}")
    if rungs:
        width = max(len(rung.name) for rung in rungs)
        lines += ["", f"{'where the tokens/s go':<{width}}  tokens/s  of plain  time per token  adds"]
        for rung, share, cost in breakdown(rungs):
            lines.append(f"{rung.name:<{width}}  {rung.median:8.0f}  {share:8.2f}  {cost:+12.1f} %  {rung.adds}")
    return "\n".join(lines)


def machine() -> dict[str, float]:
    """Return the cores and how many processes have wanted one over the last minute, before the bench adds its own."""
    return {"cores": float(os.cpu_count() or 1), "load": os.getloadavg()[0]}


def load_warning(found: Mapping[str, float]) -> str:
    """Say that the machine is busy with something else; empty when it is not."""
    if found["load"] <= 0.5 * found["cores"]:
        return ""
    return (
        f"other work runs on this machine (load {found['load']:.1f} on {found['cores']:.0f} cores): "
        "asynchronous training and extra processes look slower than they are"
    )


def write(
    out: Path,
    runs: Sequence[TrainingTimes],
    rungs: Sequence[Rung],
    checks: Sequence[Check],
    found: Mapping[str, float],
) -> None:
    """Write the result as JSON to `out` and as a page beside it; `found` is the machine before the bench."""
    result = {
        "machine": dict(found),
        "checks": [{**asdict(check), "is_kept": check.is_kept} for check in checks],
        "training": [{**asdict(run), "seconds_per_step": run.seconds_per_step} for run in runs],
        "rollouts": [{**asdict(rung), "median_tokens_per_second": rung.median} for rung in rungs],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (out, json.dumps(result, indent=1) + "\n"),
        (out.with_suffix(".html"), _page(runs, rungs, checks, load_warning(found))),
    ):
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _page(runs: Sequence[TrainingTimes], rungs: Sequence[Rung], checks: Sequence[Check], warning: str) -> str:
    names = [*(name for name in PHASES.values() if name != "wait"), "other", "wait"]
    charts = []
    highest = max((max(run.step_seconds) for run in runs), default=0.0)
    for run in runs:
        parts = {name: run.phase_seconds.get(name, ()) or (0.0,) * len(run.step_seconds) for name in names}
        steps = list(range(1, len(run.step_seconds) + 1))
        note = f"{run.seconds_per_step:.3f} s per step"
        charts.append(stacked_chart(run.name, steps, parts, unit="seconds per step", note=note, highest=highest))
    rows = "".join(
        f"<tr><td>{escape(check.name)}</td><td>{check.ratio:.2f}</td><td>{check.limit:.2f}</td><td><span class='status "
        f"{'good' if check.is_kept else 'bad'}'>{'ok' if check.is_kept else 'below'}</span></td>"
        f"<td class='reason'>{escape(check.detail)}</td></tr>"
        for check in checks
    )
    ladder = "".join(
        f"<tr><td>{escape(rung.name)}</td><td>{format_number(rung.median)}</td><td>{share:.2f}</td>"
        f"<td>{cost:+.1f} %</td><td class='reason'>{escape(rung.adds)}</td></tr>"
        for rung, share, cost in breakdown(rungs)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>bench</title>'
        f"<style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head><body><main><h1>Bench</h1>"
        f"{f'<ul class=warnings><li>{escape(warning)}</li></ul>' if warning else ''}"
        "<section><div class='scroll'><table class='numbers'><thead><tr><th>what</th><th>ratio</th><th>limit</th>"
        f"<th>verdict</th><th class='reason'>measured</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
        f"<section class='charts'>{''.join(charts)}</section>"
        "<section><h2>Where the tokens per second go</h2><div class='scroll'><table class='numbers'><thead><tr>"
        "<th>way to generate</th><th>tokens/s</th><th>of plain</th><th>time per token</th><th class='reason'>adds</th>"
        f"</tr></thead><tbody>{ladder}</tbody></table></div></section></main></body></html>\n"
    )
