"""One page about a chain of stages, each trained from its parent's export: what each gained, and how long it took.

It links to the report of each stage, which is written beside it. A stage that has not begun has a line, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from os.path import relpath
from pathlib import Path

from markupsafe import Markup

from recipes.errors import InputError
from recipes.files import read_object, write_atomically
from tools.look.report.chart import Series, format_seconds, line_chart, page, part
from tools.look.report.load import Column, RunData, load_run
from tools.look.report.page import GREEDY, SAMPLED, Gain, gain_of, render, step_seconds, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """One stage of the chain."""

    stage: str  # e.g. "stage2.2"
    name: str  # of its blend
    run_dir: Path
    is_finished: bool
    parent: str = ""  # the stage of the chain whose export it starts from; empty: it begins with a model of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A stage with what its run has logged; `run` is None before its first step."""

    of: ChainStage
    run: RunData | None

    def gain(self, metric: str) -> Gain | None:
        """Return the gain on the held-out rows; None where they were not measured twice.

        Where the policy stays as it is and its multi-token heads are trained, that of the share of accepted drafts.
        """
        if self.run is not None and self.heals:
            return _accepted(self.run) if metric == SAMPLED else None
        gain = gain_of(self.run, metric) if self.run else None
        return gain if gain and gain.first_step < gain.last_step else None

    @property
    def heals(self) -> bool:
        return self.run is not None and bool(self.run.setting("policy.megatron_cfg.freeze_trunk"))

    @property
    def training_seconds(self) -> float:
        return sum(step_seconds(record) for record in self.run.records) if self.run else 0.0

    @property
    def seconds(self) -> float | None:
        """Wall time of its last start, from the launch of the driver to its end; None where that is unknown."""
        status = read_object(self.of.run_dir / "status.json")
        started, updated = status.get("started"), status.get("updated")
        known = isinstance(started, int | float) and isinstance(updated, int | float)
        return max(0.0, updated - started) if known else None  # type: ignore[operator]


def _accepted(run: RunData) -> Gain | None:
    """Return the share of drafts that engines accepted in its first and last steps: its rows are new to the heads."""
    column = run.column("train/vllm/spec_acceptance_rate")
    count = min(3, len(column.values) // 2)
    if not count:
        return None
    before, after = (sum(values) / count for values in (column.values[:count], column.values[-count:]))
    return Gain(first_step=column.steps[0], last_step=column.steps[-1], before=before, after=after)


def write_chain(stages: Sequence[ChainStage], out: Path) -> Path:
    """Write the page to `out`, and report.html of each stage that has done a step; return `out`."""
    chain = [_Trained(of=stage, run=_load(stage.run_dir)) for stage in stages]
    for one in chain:
        if one.run is not None:
            write_atomically(one.of.run_dir / "report.html", render(one.run).encode(errors="replace"))
    write_atomically(out, _page(chain, out).encode(errors="replace"))
    return out


def summary_lines(stages: Sequence[ChainStage]) -> list[str]:
    """Return a line per stage: what it gained on its held-out rows, sampled and greedy."""
    lines = []
    for stage in stages:
        one = _Trained(of=stage, run=_load(stage.run_dir))
        kinds = (("drafts accepted" if one.heals else "sampled", SAMPLED), ("greedy", GREEDY))
        gains = [(kind, one.gain(metric)) for kind, metric in kinds]
        told = [f"{kind} {gain.before:.3f} -> {gain.after:.3f} ({gain.delta:+.3f})" for kind, gain in gains if gain]
        state = "" if stage.is_finished else " (not finished)" if one.run else " (not begun)"
        lines.append(f"{stage.stage}{state}: {', '.join(told) or 'no gain measured'}")
    return lines


def _load(run_dir: Path) -> RunData | None:
    try:
        return load_run(run_dir)
    except InputError:
        return None


def _page(chain: Sequence[_Trained], out: Path) -> str:
    title = " to ".join(dict.fromkeys((chain[0].of.stage, chain[-1].of.stage)))
    style, verdict = _verdict(chain)
    own = ", ".join(one.of.stage for one in chain[1:] if not one.of.parent)
    apart = f"; {own}: from a model of its own" if own else ""
    facts = [f"{len(chain)} stages, each from the export of the one before{apart}"]
    if known := [one.seconds for one in chain if one.seconds is not None]:
        facts.append(f"{format_seconds(sum(known))} from start to end of all runs")
    facts.append(f"{format_seconds(sum(one.training_seconds for one in chain))} of it in training steps")
    chart = Markup(_reward_chart(chain))
    body = [
        part("page", "header", title=title, facts=facts, verdict=verdict, style=style),
        part("chain", "gains", rows=[_row(one, out.parent) for one in chain]),
        part("page", "charts", drawn=chart),
    ]
    return page(title, body)


def _verdict(chain: Sequence[_Trained]) -> tuple[str, str]:
    """Return the style and the words of what the page says first."""
    missing = [one.of.stage for one in chain if not one.of.is_finished]
    if missing:
        return "neutral", f"not finished: {', '.join(missing)}"
    gains = {one.of.stage: one.gain(SAMPLED) for one in chain}
    if unknown := [stage for stage, gain in gains.items() if gain is None]:
        return "neutral", f"all stages finished; no held-out gain was measured in {', '.join(unknown)}"
    lost = [stage for stage, gain in gains.items() if gain is not None and gain.delta <= 0]
    if lost:
        return "bad", f"all stages finished; without a gain on held-out rows: {', '.join(lost)}"
    return "good", "all stages finished, and each gained on its held-out rows"


def _row(one: _Trained, beside: Path) -> dict[str, object]:
    if one.run is None:
        return {"stage": one.of.stage, "name": one.of.name, "link": ""}
    done, planned = one.run.records[-1].step, one.run.setting("grpo.max_num_steps")
    return {
        "stage": one.of.stage,
        "name": one.of.name,
        "link": Path(relpath(one.of.run_dir / "report.html", beside)).as_posix(),
        "sampled": one.gain(SAMPLED),
        "greedy": one.gain(GREEDY),
        # A stage whose rows have run out has ended, too, before the step that was planned as its last.
        "steps": f"{done} of {planned}" if isinstance(planned, int) and not one.of.is_finished else str(done),
        "training": format_seconds(one.training_seconds),
        "whole": "" if one.seconds is None else format_seconds(one.seconds),
    }


def _reward_chart(chain: Sequence[_Trained]) -> str:
    """Draw the training reward of all stages one after the other."""
    counts = [len(trained(one.run)) if one.run else 0 for one in chain]
    series = []
    for number, (one, before) in enumerate(zip(chain, accumulate(counts, initial=0), strict=False)):
        column = one.run.column("train/reward") if one.run else Column(steps=(), values=())
        moved = Column(steps=tuple(step + before for step in column.steps), values=column.values)
        series.append(Series(label=one.of.stage, column=moved, color=number, is_smoothed=True))
    note = "Steps of all stages in a row. Each stage has rewards of its own; a jump between two is no loss."
    return line_chart("Training reward", series, include=(0.0,), note=note)
