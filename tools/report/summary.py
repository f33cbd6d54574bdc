"""The top of the page: the run's name and state, whether it learned, and the most important numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from recipes.grpo.metrics import PHASES, TIMING_PREFIX
from tools.report.axis import format_number, format_seconds
from tools.report.chart import share_bar
from tools.report.load import RunData, StepRecord

SAMPLED, GREEDY = "accuracy", "greedy_accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One validation metric at its first and last measurement."""

    first_step: int
    last_step: int
    before: float
    after: float

    @property
    def delta(self) -> float:
        return self.after - self.before


def gain_of(run: RunData, metric: str, agent: str = "") -> Gain | None:
    """Return before and after of `validation/[<agent>/]<metric>`, or None when it was never measured."""
    column = run.column("/".join(part for part in ("validation", agent, metric) if part))
    if not column.values:
        return None
    return Gain(
        first_step=column.steps[0], last_step=column.steps[-1], before=column.values[0], after=column.values[-1]
    )


def phase_seconds(record: StepRecord) -> dict[str, float]:
    """Return the seconds of one step per short phase name; `other` is the time outside all phases."""
    values = record.values
    seconds = {short: values[TIMING_PREFIX + name] for name, short in PHASES.items() if TIMING_PREFIX + name in values}
    total = values.get(TIMING_PREFIX + "total_step_time")
    if total is not None:
        seconds["other"] = max(0.0, total - sum(seconds.values()))
    return seconds


def spent_by_phase(records: Iterable[StepRecord]) -> dict[str, float]:
    """Return the seconds of several steps together, per short phase name."""
    spent: dict[str, float] = {}
    for record in records:
        for phase, seconds in phase_seconds(record).items():
            spent[phase] = spent.get(phase, 0.0) + seconds
    return spent


def trained(run: RunData) -> list[StepRecord]:
    """Return the records of optimizer steps, without the validation before training."""
    return [record for record in run.records if record.step > 0 and TIMING_PREFIX + "policy_training" in record.values]


def header(run: RunData, *, min_gain: float | None) -> str:
    """Return the title, the state of the run and the verdict on its gain."""
    facts = [fact for fact in (_stage(run), _model(run), _state(run), _logged_at(run)) if fact]
    style, verdict = _verdict(gain_of(run, SAMPLED), min_gain)
    return (
        f'<header><p class="kicker">Super RL recipe</p><h1>{escape(run.name)}</h1>'
        f'<p class="facts">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</p>'
        f'<p class="verdict {style}">{escape(verdict)}</p></header>'
    )


def tiles(run: RunData) -> str:
    """Return the tiles with the headline numbers."""
    steps = trained(run)
    found: list[tuple[str, str, str]] = []
    for label, metric in (("held-out reward", SAMPLED), ("held-out, greedy", GREEDY)):
        gain = gain_of(run, metric)
        if gain is not None:
            change = (
                f"{gain.before:.3f} at step {gain.first_step}" if gain.first_step != gain.last_step else "one value"
            )
            found.append((label, f"{gain.after:.3f}", change))
    rewards = run.column("train/reward").values
    if rewards:
        tail = rewards[-5:]
        found.append(("training reward", f"{statistics.fmean(tail):.3f}", f"last {len(tail)} steps"))
    totals = [step_seconds(record) for record in steps]
    if totals:
        found.append(("step time", format_seconds(statistics.median(totals)), f"median of {len(totals)}"))
        found.append(("training time", format_seconds(sum(totals)), "sum of the steps"))
    speeds = run.column("performance/generation_tokens_per_sec").values
    if speeds:
        found.append(("generation", f"{format_number(statistics.median(speeds))} tok/s", "median"))
    mismatch = run.column("train/logprob_error_max").values
    if mismatch:
        found.append(("log-prob gap", format_number(max(mismatch)), "largest"))
    lost, total = _lost(run)
    if total:
        found.append(("no verdict", f"{lost:.0f}", f"of {format_number(total)} rollouts"))
    cells = (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for label, value, note in found
    )
    return f'<section class="tiles">{"".join(cells)}</section>'


def shares(run: RunData) -> str:
    """Return the shares of the step time by activity, for the policy and for the engines."""
    steps = trained(run)
    spent = spent_by_phase(steps)
    total = sum(spent.values())
    if not total:
        return ""
    # These classes give the colours of the chart of seconds per step.
    names = [
        ("train", "train", "c3"),
        ("refit", "refit", "c4"),
        ("validation", "val", "c5"),
        ("checkpoint", "save", "c6"),
        ("idle", "wait", "c8"),
    ]
    policy = [(label, spent.get(phase, 0.0) / total, style) for label, phase, style in names]
    policy.insert(-1, ("other", 1.0 - sum(share for _, share, _ in policy), "c7"))
    bars = [("Policy", policy)]
    idle = share_of_time(steps, "idle/generation")
    if idle is not None:
        bars.append(("Generation", [("generate", 1.0 - idle, "c3"), ("idle", idle, "c8")]))
    rows = "".join(f'<div class="sharerow"><span>{label}</span>{share_bar(parts)}</div>' for label, parts in bars)
    line = _share_line(spent, total, idle)
    return f'<section><h2>Where the time went</h2>{rows}<p class="note">{escape(line)}</p></section>'


def validation_table(run: RunData) -> str:
    """Return the table of held-out rewards per agent: first and last measurement, sampled and greedy."""
    overall = gain_of(run, SAMPLED)
    if overall is None:
        return ""
    rows = [_validation_row(run, "all", "")]
    rows += [_validation_row(run, agent, agent) for agent in run.agents("validation/", f"/{SAMPLED}")]
    last = "" if overall.first_step == overall.last_step else f"step {overall.last_step}"
    steps = f"<th>step {overall.first_step}</th><th>{last}</th><th>{'gain' if last else ''}</th>"
    return (
        "<section><h2>Held-out reward per environment</h2><div class='scroll'><table class='numbers'>"
        "<thead><tr><th></th><th colspan='4'>sampled</th><th colspan='3'>greedy</th></tr><tr><th>environment</th>"
        f"{steps}<th></th>{steps}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def status_table(run: RunData) -> str:
    """Return the table of how rollouts ended, with the reason of a sampled one for each status."""
    prefix = "train/rollout_status/"
    names = sorted({key[len(prefix) :] for record in run.records for key in record.values if key.startswith(prefix)})
    counts = {name: sum(run.column(prefix + name).values) for name in names}
    total = sum(counts.values())
    if not total:
        return ""
    rows = "".join(
        f"<tr><td><span class='status {_status_style(name)}'>{escape(name)}</span></td><td>{count:.0f}</td>"
        f"<td>{100 * count / total:.1f} %</td><td class='reason'>{escape(_example_reason(run, name))}</td></tr>"
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
        if count or name in ("completed", "truncated")
    )
    return (
        "<section><h2>How rollouts ended</h2><div class='scroll'><table class='numbers'><thead><tr><th>status</th>"
        "<th>rollouts</th><th>share</th><th class='reason'>reason of one that was sampled</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _verdict(gain: Gain | None, min_gain: float | None) -> tuple[str, str]:
    if gain is None:
        return "neutral", "the run has no validation, so it has no held-out gain"
    if gain.first_step == gain.last_step:
        return "neutral", f"held-out reward {gain.after:.3f} at step {gain.last_step}; a gain needs a second validation"
    text = (
        f"held-out reward {gain.before:.3f} at step {gain.first_step}, {gain.after:.3f} at step {gain.last_step}: "
        f"gain {gain.delta:+.3f}"
    )
    if min_gain is None:
        return ("good" if gain.delta > 0 else "bad"), text
    reached = gain.delta >= min_gain
    return (
        "good" if reached else "bad"
    ), f"{text}, required {min_gain:+.2f}: {'reached' if reached else 'NOT reached'}"


def _stage(run: RunData) -> str:
    stage = run.lock.get("stage")
    return f"stage {stage}" if isinstance(stage, str) and stage else ""


def _model(run: RunData) -> str:
    model = run.setting("policy.model_name")
    return f"from {str(model).rstrip('/').rsplit('/', 1)[-1]}" if model else ""


def _state(run: RunData) -> str:
    done, planned = run.records[-1].step, run.setting("grpo.max_num_steps")
    if not isinstance(planned, int):
        return f"{done} steps"
    return f"all {done} steps done" if done >= planned else f"step {done} of {planned}, not finished"


def _logged_at(run: RunData) -> str:
    last = run.records[-1].time
    return f"last line {datetime.fromtimestamp(last, UTC):%Y-%m-%d %H:%M} UTC" if last else ""


def step_seconds(record: StepRecord) -> float:
    """Return the seconds of one step."""
    return sum(phase_seconds(record).values())


def _lost(run: RunData) -> tuple[float, float]:
    prefix = "train/rollout_status/"
    counts: dict[str, float] = {}
    for record in run.records:
        for key, value in record.values.items():
            if key.startswith(prefix):
                counts[key[len(prefix) :]] = counts.get(key[len(prefix) :], 0.0) + value
    total = sum(counts.values())
    return total - counts.get("completed", 0.0) - counts.get("truncated", 0.0), total


def share_of_time(steps: Sequence[StepRecord], key: str) -> float | None:
    """Return the mean of a share over the steps that have it, weighted by their seconds."""
    found = [(record.values[key], step_seconds(record)) for record in steps if key in record.values]
    seconds = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found) / seconds if seconds else None


def _share_line(spent: dict[str, float], total: float, idle: float | None) -> str:
    train = spent.get("train", 0.0) / total
    refit, wait = spent.get("refit", 0.0) / total, spent.get("wait", 0.0) / total
    generate = "" if idle is None else f"generate {1 - idle:.0%}, "
    engines = "" if idle is None else f"; engines idle {idle:.0%}"
    return (
        f"{generate}train {train:.0%}, refit {refit:.0%}, "
        f"policy idle {wait:.0%} (waits for rollouts){engines}. "
        f"Shares of {format_seconds(total)} of training steps; both sides work at the same time."
    )


def _validation_row(run: RunData, label: str, agent: str) -> str:
    sampled, greedy = gain_of(run, SAMPLED, agent), gain_of(run, GREEDY, agent)
    style = ' class="total"' if not agent else ""
    return f"<tr{style}><td>{escape(label)}</td>{gain_cells(sampled, has_bar=True)}{gain_cells(greedy)}</tr>"


def gain_cells(gain: Gain | None, *, has_bar: bool = False) -> str:
    """Return the table cells of a gain: before, after, difference, and a bar where one is asked for."""
    if gain is None:
        return "<td></td>" * (4 if has_bar else 3)
    if gain.first_step == gain.last_step:
        return f"<td>{gain.before:.3f}</td><td></td><td></td>" + ("<td></td>" if has_bar else "")
    delta = gain.delta
    style = "up" if delta > 0.0005 else "down" if delta < -0.0005 else ""
    cells = f"<td>{gain.before:.3f}</td><td>{gain.after:.3f}</td><td class='{style}'>{delta:+.3f}</td>"
    return cells + (f"<td class='barcell'>{track(gain.before, gain.after)}</td>" if has_bar else "")


def track(before: float, after: float) -> str:
    """Draw two values on a track from 0 to 1, or to the larger of them; values below 0 are drawn at its start."""
    end = max(1.0, before, after)
    before, after = (100 * max(value, 0.0) / end for value in (before, after))
    low, high = min(before, after), max(before, after)
    style = "up" if after >= before else "down"
    return (
        f'<span class="track"><i class="span {style}" style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
        f'<i class="dot before" style="left:{before:.1f}%"></i>'
        f'<i class="dot {style}" style="left:{after:.1f}%"></i></span>'
    )


def _status_style(status: str) -> str:
    return {"completed": "good", "truncated": "warn"}.get(status, "bad")


def _example_reason(run: RunData, status: str) -> str:
    for rollouts in run.rollouts.values():
        for rollout in reversed(rollouts):
            if rollout.get("status") == status != "completed":
                return _short(rollout.get("reason"))
    return ""


def _short(text: Any, limit: int = 160) -> str:
    text = str(text or "")
    return text if len(text) <= limit else f"{text[:limit]} ..."
