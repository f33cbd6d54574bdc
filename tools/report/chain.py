"""One page about a chain of stages, each trained from its parent's export: what each gained, and how long it took.

It links to the report of each stage, which is written beside it. A stage that has not begun has a line, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from os.path import relpath
from pathlib import Path
from typing import Any

from recipes.errors import InputError
from recipes.files import write_atomically
from tools.report.axis import format_seconds
from tools.report.chart import Series, line_chart
from tools.report.load import Column, RunData, load_run
from tools.report.page import STYLE_FILE, render
from tools.report.summary import GREEDY, SAMPLED, Gain, gain_cells, gain_of, step_seconds, trained

HEAD = "<th>start</th><th>end</th><th>gain</th>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """One stage of the chain."""

    stage: str  # e.g. "stage2.2"
    name: str  # of its blend
    run_dir: Path
    is_finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A stage with what its run has logged; `run` is None before its first step."""

    of: ChainStage
    run: RunData | None

    def gain(self, metric: str) -> Gain | None:
        """Return the gain on the held-out rows; None where they were not measured twice."""
        gain = gain_of(self.run, metric) if self.run else None
        return gain if gain and gain.first_step < gain.last_step else None

    @property
    def training_seconds(self) -> float:
        return sum(step_seconds(record) for record in self.run.records) if self.run else 0.0

    @property
    def seconds(self) -> float | None:
        """Wall time of its last start, from the launch of the driver to its end; None where that is unknown."""
        status = _read(self.of.run_dir / "status.json")
        started, updated = status.get("started"), status.get("updated")
        known = isinstance(started, int | float) and isinstance(updated, int | float)
        return max(0.0, updated - started) if known else None  # type: ignore[operator]


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
        gains = [(kind, one.gain(metric)) for kind, metric in (("sampled", SAMPLED), ("greedy", GREEDY))]
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
    facts = [f"{len(chain)} stages, each from the export of the one before"]
    if known := [one.seconds for one in chain if one.seconds is not None]:
        facts.append(f"{format_seconds(sum(known))} from start to end of all runs")
    facts.append(f"{format_seconds(sum(one.training_seconds for one in chain))} of it in training steps")
    rows = "".join(_row(one, out.parent) for one in chain)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head><body><main>"
        f'<header><p class="kicker">Super RL recipe</p><h1>{escape(title)}</h1>'
        f'<p class="facts">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</p>'
        f'<p class="verdict {style}">{escape(verdict)}</p></header>'
        "<section><h2>What each stage gained on its own held-out rows</h2><div class='scroll'>"
        "<table class='numbers'><thead><tr><th></th><th colspan='4'>sampled</th><th colspan='3'>greedy</th>"
        f"<th colspan='3'>run</th></tr><tr><th>stage</th>{HEAD}<th></th>{HEAD}<th>steps</th><th>training</th>"
        f"<th>whole</th></tr></thead><tbody>{rows}</tbody></table></div>"
        "<p class='note'>Start is the reward before the first step, with the weights of the stage before; end is that "
        "of the weights it hands on. Bars are from 0 to 1, or to the stage's largest value where that is more. "
        "The rows differ from stage to stage, except those of stages 1.1 to 1.3. "
        "Whole is the time of the last start, with that of Ray and the engines.</p></section>"
        f'<section class="charts">{_reward_chart(chain)}</section></main></body></html>\n'
    )


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


def _row(one: _Trained, beside: Path) -> str:
    name = f"{escape(one.of.stage)} <span class='agent'>{escape(one.of.name)}</span>"
    if one.run is None:
        return f"<tr><td>{name}</td><td colspan='10'>not begun</td></tr>"
    link = escape(Path(relpath(one.of.run_dir / "report.html", beside)).as_posix())
    done, planned = one.run.records[-1].step, one.run.setting("grpo.max_num_steps")
    # A stage whose rows have run out has ended, too, before the step that was planned as its last.
    steps = f"{done} of {planned}" if isinstance(planned, int) and not one.of.is_finished else str(done)
    whole = "" if one.seconds is None else format_seconds(one.seconds)
    sampled, greedy = gain_cells(one.gain(SAMPLED), has_bar=True), gain_cells(one.gain(GREEDY))
    return (
        f"<tr><td><a href='{link}'>{name}</a></td>{sampled}{greedy}<td>{escape(steps)}</td>"
        f"<td>{format_seconds(one.training_seconds)}</td><td>{whole}</td></tr>"
    )


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


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
