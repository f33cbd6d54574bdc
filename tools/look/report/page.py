"""The page of a run: its state, whether it learned, curves, tables, samples, prompts without a verdict, provenance."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from markupsafe import Markup

from recipes.grpo.causes import causes
from recipes.grpo.metrics import PHASES, TIMING_PREFIX, kind_of
from tools.look.report.chart import (
    Series,
    format_number,
    format_seconds,
    line_chart,
    page,
    part,
    share_bar,
    stacked_chart,
    visible,
)
from tools.look.report.ledger import Unjudged
from tools.look.report.load import Column, RunData, StepRecord
from tools.look.report.trajectory import samples, trajectories

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


def header(run: RunData, *, min_gain: float | None) -> Markup:
    """Return the title, the state of the run and the verdict on its gain."""
    facts = [fact for fact in (_stage(run), _model(run), _state(run), _logged_at(run)) if fact]
    style, verdict = _verdict(gain_of(run, SAMPLED), min_gain)
    return part("page", "header", title=run.name, facts=facts, verdict=verdict, style=style)


def tiles(run: RunData) -> Markup:
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
    return part("page", "tiles", found=found)


def shares(run: RunData) -> Markup | str:
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
    drawn = [(label, Markup(share_bar(parts))) for label, parts in bars]
    return part("report", "shares", bars=drawn, line=_share_line(spent, total, idle))


def validation_table(run: RunData) -> Markup | str:
    """Return the table of held-out rewards per agent: first and last measurement, sampled and greedy."""
    overall = gain_of(run, SAMPLED)
    if overall is None:
        return ""
    agents = [("all", ""), *((agent, agent) for agent in run.agents("validation/", f"/{SAMPLED}"))]
    rows = [(label, gain_of(run, SAMPLED, agent), gain_of(run, GREEDY, agent)) for label, agent in agents]
    return part("report", "validation", overall=overall, rows=rows)


def status_table(run: RunData) -> Markup | str:
    """Return the table of how rollouts ended, with the reason of a sampled one for each status."""
    prefix = "train/rollout_status/"
    names = sorted({key[len(prefix) :] for record in run.records for key in record.values if key.startswith(prefix)})
    counts = {name: sum(run.column(prefix + name).values) for name in names}
    total = sum(counts.values())
    if not total:
        return ""
    rows = [
        (
            part("page", "status", word=name, style=_status_style(name)),
            f"{count:.0f}",
            f"{100 * count / total:.1f} %",
            _example_reason(run, name),
        )
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
        if count or name in ("completed", "truncated")
    ]
    heads = ("status", "rollouts", "share", "reason of one that was sampled")
    return part(
        "page", "section", title="How rollouts ended", body=part("page", "table", heads=heads, rows=rows, reason=(3,))
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
    done, asked = run.records[-1].step, run.setting("grpo.max_num_steps")
    planned = run.num_steps or asked
    if not isinstance(planned, int):
        return f"{done} steps"
    fewer = f" of the {asked} asked for" if isinstance(asked, int) and asked > planned else ""
    return f"all {done} steps done{fewer}" if done >= planned else f"step {done} of {planned}, not finished"


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


MAX_SHOWN = 50
_MAX_REASON = 300  # characters; a reason may quote what a model wrote


def unjudged_table(prompts: Sequence[Unjudged], rows_file: str) -> Markup | str:
    """Return the table of prompts without a verdict; nothing when every prompt has one."""
    if not prompts:
        return ""
    shown = prompts[:MAX_SHOWN]
    names = _names(Path(rows_file), {one.line for one in shown}) if rows_file else {}
    rows = [(one.line, visible(names.get(one.line, one.prompt_id)), visible(one.reason[:_MAX_REASON])) for one in shown]
    kinds = Counter(kind_of(one.reason) for one in prompts).most_common(5)
    counted = Markup(", ").join(visible(f"{kind} {count}") for kind, count in kinds)
    more = f"; the first {MAX_SHOWN} are shown, the ledger has all" if len(prompts) > MAX_SHOWN else ""
    note = Markup("{} of {}: {}{}").format(len(prompts), rows_file, counted, more)
    table = part("page", "table", heads=("line", "prompt", "why"), rows=rows, reason=(1, 2))
    return part("page", "section", title="Prompts without a verdict", body=table, note=note)


def _names(rows_file: Path, lines: set[int]) -> Mapping[int, str]:
    """Return what rows call their task, by line; empty where the file is gone or a row has no name."""
    names: dict[int, str] = {}
    try:
        with rows_file.open("rb") as rows:
            for number, text in enumerate(islice(rows, max(lines)), start=1):
                if number in lines and (name := _instance(json.loads(text))):
                    names[number] = name
    except (OSError, ValueError, RecursionError):
        return names
    return names


def _instance(row: Any) -> str:
    """Return the `instance_id` of a row, in whichever of its objects it is; "" without one."""
    objects = [row, *(_member(row, key) for key in ("metadata", "verifier_metadata", "responses_create_params"))]
    objects.append(_member(objects[-1], "metadata"))
    names = (_member(one, "instance_id") for one in objects)
    return next((name for name in names if isinstance(name, str)), "")


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


MAX_NON_FINITE = 8  # steps listed per metric


def render(run: RunData, *, min_gain: float | None = None) -> str:
    """Return the whole page; `min_gain` is the held-out gain that the verdict asks for."""
    body = [
        header(run, min_gain=min_gain),
        part("page", "warnings", messages=_warnings(run)),
        tiles(run),
        part("page", "charts", drawn=Markup("".join(_charts(run)))),
        validation_table(run),
        shares(run),
        status_table(run),
        unjudged_table(run.unjudged, str(run.setting("data.train.data_path") or "")),
        samples(run),
        trajectories(run),
        _provenance(run),
    ]
    return page(f"{run.name}: run report", body)


def _charts(run: RunData) -> Iterator[str]:
    yield _reward_chart(run)
    yield _agent_chart(run)
    yield from _off_policy_charts(run)
    if (alike := _share_alike(run)).values:  # where rewards are compared
        yield line_chart(
            "Groups without a gradient",
            [Series(label="scored alike", column=alike, color=3, is_smoothed=True)],
            unit="share of groups",
            include=(0.0, 1.0),
            note="Nothing is learned from a prompt whose answers all earn the same.",
        )
    yield _solved_chart(run)
    yield from _answer_charts(run)
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
            Series(label="of the heads", column=run.column("train/mtp/grad_norm"), color=2, is_smoothed=True),
            Series(label="|loss|", column=_absolute(run.column("train/loss")), color=1, is_smoothed=True),
            Series(label="learning rate", column=run.column("train/lr"), color=4),
        ],
        unit="log scale",
        is_log=True,
    )


def _solved_chart(run: RunData) -> str:
    """Draw how many prompts of each step were solved never, at times, always."""
    kinds = ("never", "less than half", "half and more", "always")
    counts: dict[int, Counter[str]] = {}
    for line in run.pass_rates:
        rate = line.get("pass_rate")
        if isinstance(rate, int | float):
            kind = kinds[0 if rate <= 0 else 3 if rate >= 1 else 1 if rate < 0.5 else 2]
            counts.setdefault(line["step"], Counter())[kind] += 1
    parts = {kind: [float(counts[step][kind]) for step in sorted(counts)] for kind in kinds}
    note = "Only prompts that are solved at times teach."
    return stacked_chart("Prompts by pass rate", sorted(counts), parts, unit="prompts, legend: mean", note=note)


def _answer_charts(run: RunData) -> Iterator[str]:
    names = {"truncated": "truncation_rate", "masked": "masked_seqs_share", "ratio out of bounds": "is_oob_ratio"}
    names |= {"wrong tool calls": "invalid_tool_call_rate", "wrong thinking": "malformed_thinking_rate"}
    names |= {"calls of unknown tools": "unknown_tool_rate"}
    shares = [
        Series(label=label, column=run.column(f"train/{name}"), color=color, is_smoothed=True)
        for color, (label, name) in enumerate(names.items())
    ]
    yield line_chart("What is wrong with answers", shares, unit="share", include=(0.0, 1.0))
    entropy = Series(label="entropy", column=run.column("train/approx_entropy"), color=0, is_smoothed=True)
    kl = Series(label="KL to the reference", column=run.column("train/kl_penalty"), color=1, is_smoothed=True)
    note = "Where the entropy is gone, all answers to a prompt are the same, and nothing more is learned."
    yield line_chart("Entropy", [entropy, kl], unit="nats per token", include=(0.0,), note=note)
    sides = {"preferred": "rewards_chosen_mean", "the other": "rewards_rejected_mean"}
    pairs = [
        Series(label=label, column=run.column(f"train/{name}"), color=color, is_smoothed=True)
        for color, (label, name) in enumerate(sides.items())
    ]
    if any(one.column.values for one in pairs):  # of a run that learns from pairs
        note = "Log-probability of an answer, above that under the start weights. A step without pairs has no point."
        yield line_chart("Answers of a pair", pairs, unit="nats", include=(0.0,), note=note)


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
    steps = trained(run)
    per_step = [phase_seconds(record) for record in steps]
    names = [*(name for name in PHASES.values() if name != "wait"), "other", "wait"]  # waiting is drawn on top, in grey
    parts = {name: [seconds.get(name, 0.0) for seconds in per_step] for name in names}
    return stacked_chart(
        "Seconds per step",
        [record.step for record in steps],
        parts,
        unit="s, legend: mean",
        note="wait: the policy waits for rollouts.",
    )


def _share_alike(run: RunData) -> Column:
    """Return the share of a step's groups whose rewards are equal; of no step where this does not matter."""
    alike, groups = run.column("train/num_groups_zero_variance"), run.column("train/num_groups")
    of = dict(zip(groups.steps, groups.values, strict=True))
    pairs = zip(alike.steps, alike.values, strict=True)
    return Column(steps=alike.steps, values=tuple(count / of[step] for step, count in pairs))


def _minus_one(column: Column) -> Column:
    return Column(steps=column.steps, values=tuple(value - 1.0 for value in column.values))


def _absolute(column: Column) -> Column:
    return Column(steps=column.steps, values=tuple(abs(value) for value in column.values))


def _warnings(run: RunData) -> list[str]:
    messages = list(run.warnings)
    bad: dict[str, list[int]] = {}
    for record in run.records:
        for key in record.non_finite:
            bad.setdefault(key, []).append(record.step)
    for key, steps in sorted(bad.items()):
        shown = ", ".join(map(str, steps[:MAX_NON_FINITE])) + (" ..." if len(steps) > MAX_NON_FINITE else "")
        messages.append(f"{key} was not a finite number at step {shown}")
    return messages + little_learned(run.records)


def little_learned(records: Sequence[StepRecord]) -> list[str]:
    """Say why steps taught little: each cause with how many had it, and what the last of them says."""
    steps: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for cause in causes(record.values):
            steps.setdefault(cause.name, []).append((record.step, cause.text))
    total = len([record for record in records if TIMING_PREFIX + "policy_training" in record.values])
    return [
        f"{name}, in {len(found)} of {total} steps; the last of them, step {found[-1][0]}: {found[-1][1]}"
        for name, found in steps.items()
    ]


def _provenance(run: RunData) -> Markup | str:
    """Return run.lock.json as a table, and the resolved configuration folded."""
    rows, folded = list(_lock_rows(run.lock)), None
    if run.resolved:
        folded = {"count": len(run.resolved), "text": json.dumps(run.resolved, indent=2, ensure_ascii=False)}
    return part("report", "provenance", rows=rows, folded=folded) if rows or folded else ""


def _lock_rows(lock: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of every leaf; all packages are one row."""
    for key, value in lock.items():
        if key == "packages" and isinstance(value, Mapping):
            yield key, ", ".join(f"{name} {version}" for name, version in value.items())
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{name}", text) for name, text in _lock_rows(value))
        elif value not in ("", None):
            yield key, str(value)
