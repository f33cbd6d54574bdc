"""The results of the bench: ratios and their limits, as a table, as JSON and as a page with plots."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from markupsafe import Markup

from recipes.files import write_atomically
from recipes.grpo.metrics import PHASES
from tools.look.report.chart import format_number, page, part, stacked_chart

# Set by the bench; every other key has the stage's value.
SETTINGS = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
)


LIMITS: Mapping[float, float] = {0.0: 1.1, 0.5: 1.8}
"""Mean environment latency in seconds -> the smallest ratio of a synchronous to an asynchronous step time."""
ROLLOUT_LIMIT = 0.9  # of the tokens per second of plain vLLM
SPLIT_LIMIT = 0.8  # of the speed of `cat` into a file and `sha256sum` together
FILL_LIMIT, VALIDATE_LIMIT = 1.1, 1.5  # times the speed of one process, with two cores or more
PUSH_NAMES = {"drain": "end before it", "keep": "keep their caches", "recompute": "compute their caches again"}
FILL_MEMORY_LIMIT = 0.8  # memory for a tenth of the rows / memory for all: memory must not grow with the file


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTimes:
    """The measured steps of one way to train, without the warm-up steps."""

    max_age: int  # grpo.async_grpo.max_trajectory_age_steps; 0 is synchronous
    latency: float  # mean seconds per rollout that are added to the environment's own time
    step_seconds: tuple[float, ...]
    phase_seconds: Mapping[str, tuple[float, ...]]  # short name of the phase -> one value per step
    generated_tokens: tuple[float, ...]  # per sample, mean of the step
    mismatch: tuple[float, ...]  # mean exp|engine - trainer log-probability| - 1 of the step's tokens
    at_push: str = "keep"  # what becomes of running requests when weights are pushed

    @property
    def name(self) -> str:
        return f"{'async' if self.max_age else 'sync'}, {self.latency:g} s"

    @property
    def seconds_per_step(self) -> float:
        """The median of the mean over every max_age + 1 consecutive steps.

        When environments are slow, a step that waits is followed by max_age steps that do not wait. The median of
        single steps would be one or the other by chance.
        """
        width = min(self.max_age + 1, len(self.step_seconds))
        windows = zip(*(self.step_seconds[start:] for start in range(width)), strict=False)
        return statistics.median(statistics.fmean(window) for window in windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpeed:
    """The speed of one way to generate the same samples; each way adds something to the one before."""

    name: str
    adds: str
    tokens_per_second: tuple[float, ...]  # one value per round

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One ratio, and the limit that it must reach."""

    name: str
    ratio: float
    limit: float
    detail: str

    @property
    def is_kept(self) -> bool:
        return self.ratio >= self.limit


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of all rounds: a slow minute of the machine changes both sides of a round."""
    return statistics.median(above / below for above, below in zip(over, under, strict=True))


def training_checks(runs: Sequence[TrainingTimes]) -> list[Check]:
    """Compare asynchronous with synchronous steps at each latency, by the median of the ratios of all passes."""
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


def rollout_check(ways: Sequence[GenerationSpeed], ours: str) -> Check:
    """Compare the way named `ours` with the first one, which is plain vLLM."""
    plain = ways[0]
    mine = next(way for way in ways if way.name == ours)
    return Check(
        name=f"{ours} over {plain.name}",
        ratio=median_ratio(mine.tokens_per_second, plain.tokens_per_second),
        limit=ROLLOUT_LIMIT,
        detail=f"{format_number(plain.median)} -> {format_number(mine.median)} tokens/s",
    )


def breakdown(ways: Sequence[GenerationSpeed]) -> list[tuple[GenerationSpeed, float, float]]:
    """Return (way, its speed over that of the first way, the time per token that it adds to the way before).

    The added time is in percent of the first way's time per token, so that the times of all ways add up.
    """
    before, rows = 1.0, []
    for way in ways:
        share = median_ratio(way.tokens_per_second, ways[0].tokens_per_second)
        rows.append((way, share, 100.0 * (1.0 / share - before)))
        before = 1.0 / share
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCost:
    """What one way to treat running requests at a push costs, and what it does to the mismatch."""

    max_age: int
    at_push: str
    seconds_per_step: float
    ratio: float  # of its step time to that of keeping the caches
    mismatch: float


def push_costs(runs: Sequence[TrainingTimes]) -> list[PushCost]:
    """Return the cost of each way at each age, by the median of all passes."""
    found: dict[tuple[int, str], list[TrainingTimes]] = {}
    for run in runs:
        found.setdefault((run.max_age, run.at_push), []).append(run)
    costs = []
    for (max_age, at_push), own in sorted(found.items()):
        seconds = [run.seconds_per_step for run in own]
        kept = [run.seconds_per_step for run in found[max_age, "keep"]]
        cost = PushCost(
            max_age=max_age,
            at_push=at_push,
            seconds_per_step=statistics.median(seconds),
            ratio=median_ratio(seconds, kept),
            mismatch=statistics.median(statistics.fmean(run.mismatch) for run in own),
        )
        costs.append(cost)
    return costs


def push_table(costs: Sequence[PushCost]) -> str:
    """Return the costs as aligned text."""
    lines = ["running requests at a push   age  s/step  of keep  mismatch"]
    for cost in costs:
        name = PUSH_NAMES.get(cost.at_push, cost.at_push)
        line = f"{name:<28} {cost.max_age:4d}  {cost.seconds_per_step:6.3f}  {cost.ratio:7.2f}  {cost.mismatch:8.1e}"
        lines.append(line)
    return "\n".join(lines)


def table(checks: Sequence[Check], ways: Sequence[GenerationSpeed]) -> str:
    """Return the checks and the breakdown as aligned text."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'what':<{width}}  ratio  limit  verdict  measured"]
    for check in checks:
        verdict = "ok" if check.is_kept else "BELOW"
        lines.append(f"{check.name:<{width}}  {check.ratio:5.2f}  {check.limit:5.2f}  {verdict:<7}  {check.detail}")
    if ways:
        width = max(len(way.name) for way in ways)
        lines += ["", f"{'where the tokens/s go':<{width}}  tokens/s  of plain  time per token  adds"]
        for way, share, cost in breakdown(ways):
            lines.append(f"{way.name:<{width}}  {way.median:8.0f}  {share:8.2f}  {cost:+12.1f} %  {way.adds}")
    return "\n".join(lines)


def machine() -> dict[str, float]:
    """Return the number of cores, and the load of the last minute; called before the bench adds its own load."""
    return {"cores": float(os.cpu_count() or 1), "load": os.getloadavg()[0]}


def load_warning(found: Mapping[str, float]) -> str:
    """Return a warning when other work keeps the machine busy, else an empty text."""
    if found["load"] <= 0.5 * found["cores"]:
        return ""
    return (
        f"other work runs on this machine (load {found['load']:.1f} on {found['cores']:.0f} cores): "
        "asynchronous training and extra processes look slower than they are"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that the bench has measured."""

    machine: Mapping[str, float]  # before the bench
    training: Sequence[TrainingTimes]
    pushes: Sequence[TrainingTimes]
    rollouts: Sequence[GenerationSpeed]
    checks: Sequence[Check]


def write(out: Path, results: Results) -> None:
    """Write the results as JSON to `out` and as a page beside it."""
    result = {
        "machine": dict(results.machine),
        "checks": [{**asdict(check), "is_kept": check.is_kept} for check in results.checks],
        "training": [{**asdict(run), "seconds_per_step": run.seconds_per_step} for run in results.training],
        "pushes": [asdict(cost) for cost in push_costs(results.pushes)],
        "rollouts": [{**asdict(way), "median_tokens_per_second": way.median} for way in results.rollouts],
    }
    write_atomically(out, (json.dumps(result, indent=1) + "\n").encode())
    write_atomically(out.with_suffix(".html"), _page(results).encode())


def _page(results: Results) -> str:
    runs, ways, checks, warning = results.training, results.rollouts, results.checks, load_warning(results.machine)
    names = [*(name for name in PHASES.values() if name != "wait"), "other", "wait"]
    charts = []
    highest = max((max(run.step_seconds) for run in runs), default=0.0)
    for run in runs:
        parts = {name: run.phase_seconds.get(name, ()) or (0.0,) * len(run.step_seconds) for name in names}
        steps = list(range(1, len(run.step_seconds) + 1))
        note = f"{run.seconds_per_step:.3f} s per step"
        charts.append(stacked_chart(run.name, steps, parts, unit="seconds per step", note=note, highest=highest))
    rows = [
        (
            check.name,
            f"{check.ratio:.2f}",
            f"{check.limit:.2f}",
            part("page", "status", word="ok" if check.is_kept else "below", style="good" if check.is_kept else "bad"),
            check.detail,
        )
        for check in checks
    ]
    ladder = [
        (way.name, format_number(way.median), f"{share:.2f}", f"{cost:+.1f} %", way.adds)
        for way, share, cost in breakdown(ways)
    ]
    pushes = [
        (
            PUSH_NAMES.get(cost.at_push, cost.at_push),
            cost.max_age,
            f"{cost.seconds_per_step:.3f}",
            f"{cost.ratio:.2f}",
            format_number(cost.mismatch),
        )
        for cost in push_costs(results.pushes)
    ]
    tables = (
        ("Ratios", ("what", "ratio", "limit", "verdict", "measured"), rows),
        (
            "Where the tokens per second go",
            ("way to generate", "tokens/s", "of plain", "time per token", "adds"),
            ladder,
        ),
        ("Running requests at a push of weights", ("they", "age", "s per step", "of keep", "mismatch"), pushes),
    )
    first, *others = (
        part("page", "section", title=title, body=part("page", "table", heads=heads, rows=found, reason=(4,)))
        for title, heads, found in tables
    )
    body = [
        part("page", "header", title="Bench"),
        part("page", "warnings", messages=[warning] if warning else []),
        first,
        part("page", "charts", drawn=Markup("".join(charts))),
        *others,
    ]
    return page("bench", body)
