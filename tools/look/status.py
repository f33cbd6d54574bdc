"""Say what a run is doing: stage, job, step, reward, staleness, last save, failures, and who waits for whom right now.

Exit status: 0 it runs, waits or ended well, 1 it failed, died or does not answer, 2 there is no such run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from recipes.errors import InputError
from recipes.grpo.causes import causes
from recipes.grpo.metrics import PHASES, TIMING_PREFIX
from tools.command_line import exit_status
from tools.draft.slurm import slurm_seconds
from tools.look.report.chart import format_seconds
from tools.look.report.load import StepRecord
from tools.look.report.page import share_of_time, spent_by_phase
from tools.look.run_state import ObservedRun, RunStatus, ask_slurm, find_run, read_run

# The errors of wrong input, with which the same start fails again.
_OF_THE_USER = (InputError.__name__, *(kind.__name__ for kind in InputError.__subclasses__()))
_RECENT = 10  # steps that "now" means
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_STYLES = {
    RunStatus.RUNNING: "bold green",
    RunStatus.DONE: "bold green",
    RunStatus.FAILED: "bold red",
    RunStatus.DEAD: "bold red",
    RunStatus.SILENT: "bold red",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the status: what it is about, what it says."""

    label: str
    text: str
    style: str = ""


def headline(run: ObservedRun) -> str:
    """Return the run's name, stage and state in one line."""
    steps = f"step {run.step}" + (f" of {run.num_steps}" if run.num_steps else "")
    what = {RunStatus.DONE: "done", RunStatus.DEAD: "DEAD", RunStatus.FAILED: "FAILED", RunStatus.SILENT: "SILENT"}
    parts = [run.run_dir.name, run.stage, what.get(run.status, str(run.status)), steps]
    return "  ".join(part for part in parts if part)


def lines(run: ObservedRun) -> list[Line]:
    """Return everything there is to say about a run, in the order of a reader's questions."""
    bad = run.status.exit_code != 0
    found = [
        Line("state", run.why, "red" if bad else ""),
        Line("job", _job(run)),
        Line("step", _steps(run)),
        Line("reward", _reward(run), "cyan"),
        *(Line("learning", text, "red") for text in _little_learned(run)),
        Line("held-out", _held_out(run), "green"),
        Line("staleness", _staleness(run)),
        Line("failures", _failures(run)),
        *(Line("missing", text, "red") for text in _missing(run)),
        Line("paused", _paused(run), "red"),
        Line("saved", _saved(run)),
        Line("a step", _shares(run)),
        *(Line("note", note, "yellow") for note in run.queue.notes),
        *(Line(_when(run), text, "bold") for text in waits(run)),
    ]
    if bad or run.status is RunStatus.STARTING:
        found += [Line("log", text, "dim") for text in run.last_words]
    found.append(Line("next", advice(run), "bold yellow" if bad else ""))
    labels: set[str] = set()
    kept = []
    for line in found:
        if line.text:
            kept.append(Line("" if line.label in labels else line.label, line.text, line.style))
            labels.add(line.label)
    return kept


def waits(run: ObservedRun) -> list[str]:
    """Return who does what, and who waits for whom since when, for both sides of the loop."""
    if run.status not in (RunStatus.RUNNING, RunStatus.SILENT) or "phase" not in run.heartbeat:
        return []
    return [_policy_waits(run), _engines_wait(run)]


def _when(run: ObservedRun) -> str:
    age = run.now - run.heartbeat.get("updated", run.now)
    return "now" if age < 2 else f"{age:.0f} s ago"


def _policy_waits(run: ObservedRun) -> str:
    heartbeat = run.heartbeat
    step, phase, seconds = heartbeat["step"] + 1, heartbeat["phase"], f"{heartbeat['phase_seconds']:.1f} s"
    if phase == "exposed_generation":
        have = f"{heartbeat['ready'].get(str(step), 0)} of {heartbeat['prompts_per_step']} groups"
        return f"policy waits for the engines since {seconds}: step {step} has {have}"
    if phase in ("weight_sync", "validation", "checkpointing"):  # these come after the step was counted
        return f"policy is busy since {seconds}: {phase} after step {heartbeat['step']}{_unusual(run)}"
    if phase:
        return f"policy is busy since {seconds}: {phase} of step {step}{_unusual(run)}"
    if heartbeat["step"] == heartbeat["num_steps"]:
        return "all steps are done, the run is ending"
    if not run.trained:
        return "policy pushes its first weights, or waits for the validation before the first step"
    return f"policy is between two phases, {heartbeat['step']} steps done"


def _engines_wait(run: ObservedRun) -> str:
    heartbeat = run.heartbeat
    if heartbeat["in_flight"]:
        oldest = heartbeat["waiting_for"].partition(", prompt ")[0]
        return f"engines sample {heartbeat['in_flight']} groups; {oldest}"
    if heartbeat["phase"] == "validation":
        return "engines sample the validation rows"
    if not heartbeat["ready"]:
        return "engines wait for the policy: nothing is asked of them"
    ready = ", ".join(f"{count} for step {target}" for target, count in heartbeat["ready"].items())
    return f"engines wait for the policy: all groups that they may start are sampled ({ready})"


def advice(run: ObservedRun) -> str:
    """Return what to do about a run that ended; empty while it goes well."""
    lost = run.step - (run.saved_step or 0)
    again = f"start it again: it resumes after step {run.saved_step}" if run.saved_step else "start it again"
    if run.status is RunStatus.SILENT:
        return f"look at {run.run_dir}/logs/latest/driver.log; to end it: kill {run.heartbeat['pid']} on its host"
    if run.status is RunStatus.FAILED and run.why.partition(":")[0] in _OF_THE_USER:
        again = f"correct what the state names, then {again}"
    if run.status in (RunStatus.STOPPED, RunStatus.FAILED, RunStatus.DEAD):
        return again + (f", {lost} steps are trained again" if lost > 0 else "")
    if run.status is RunStatus.DONE:
        results = run.run_dir.parent
        elsewhere = (
            "" if results.resolve() == Path("results").resolve() else f" RESULTS_DIR={shlex.quote(str(results))}"
        )
        return f"make report EXP_NAME={run.run_dir.name}{elsewhere}"
    return ""


def eta_seconds(run: ObservedRun) -> float | None:
    """Return the seconds to the last step at the pace of the recent ones."""
    seconds = _step_seconds(run)
    if seconds is None or run.num_steps is None:
        return None
    return seconds * max(0, run.num_steps - run.step)


def sparkline(values: Sequence[float], *, width: int = 24) -> str:
    """Return the course of some values as a row of bars, the newest last."""
    if len(values) < 2:
        return ""
    size = -(-len(values) // width)
    means = [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in means)


def as_json(run: ObservedRun) -> dict[str, Any]:
    """Return the state for scripts."""
    return {
        "run_dir": str(run.run_dir),
        "stage": run.stage,
        "state": str(run.status),
        "why": run.why,
        "step": run.step,
        "num_steps": run.num_steps,
        "saved_step": run.saved_step,
        "saved_at": run.saved_at or None,
        "eta_seconds": None if run.status.is_over else eta_seconds(run),
        "reward": _last(run, "train/reward"),
        "max_trajectory_age": _last(run, "train/max_trajectory_age"),
        "rollouts_without_verdict": sum(_lost(run).values()),
        "missing": dict(run.heartbeat.get("missing", {})),
        "waits": waits(run),
        "jobs": [str(job) for job in run.queue.jobs],
        "next": advice(run),
    }


def render(run: ObservedRun) -> Group:
    """Return the status as aligned, coloured lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines(run):
        table.add_row(line.label, Text(line.text, style=line.style))
    return Group(Text(headline(run), style=_STYLES.get(run.status, "bold yellow")), table)


def plain(run: ObservedRun) -> str:
    """Return the status as aligned text without colour."""
    return "\n".join([headline(run), *(f"  {line.label:<10}{line.text}" for line in lines(run))])


def _job(run: ObservedRun) -> str:
    jobs = [str(job) for job in run.queue.jobs]
    heartbeat = run.heartbeat
    driver = f"driver pid {heartbeat['pid']} on {heartbeat['host']}" if heartbeat else ""
    since = f"started {_ago(run.now - heartbeat['started'])}" if heartbeat else ""
    return ", ".join(part for part in (*jobs, run.attempt, driver, since) if part)


def _steps(run: ObservedRun) -> str:
    seconds, eta = _step_seconds(run), eta_seconds(run)
    if seconds is None:
        return "none done yet"
    text = f"{format_seconds(seconds)} a step (median of the last {min(_RECENT, len(run.trained))})"
    last = f"last logged {_ago(run.now - run.records[-1].time)}"
    if eta and run.status is RunStatus.RUNNING:
        job = run.queue.running
        left = slurm_seconds(job.left) if job is not None else None
        more = ", which is more than this job has left" if left is not None and left < eta else ""
        return f"{text}, {last}, ends in about {format_seconds(eta)}{more}"
    return f"{text}, {last}"


def _reward(run: ObservedRun) -> str:
    values = [record.values["train/reward"] for record in run.records if "train/reward" in record.values]
    if not values:
        return ""
    return f"{values[-1]:.3f}, last {len(values[-_RECENT:])} steps {statistics.fmean(values[-_RECENT:]):.3f}" + (
        f"  {sparkline(values)}" if len(values) > 1 else ""
    )


def _little_learned(run: ObservedRun) -> list[str]:
    """Say why the last step taught little."""
    return [f"step {last.step}: {cause.text}" for last in run.trained[-1:] for cause in causes(last.values)]


def _held_out(run: ObservedRun) -> str:
    found = [
        (record.step, record.values["validation/accuracy"])
        for record in run.records
        if "validation/accuracy" in record.values
    ]
    if not found:
        return ""
    (first, before), (last, after) = found[0], found[-1]
    return f"{after:.3f} at step {last}" + (f", {before:.3f} at step {first}" if last != first else "")


def _staleness(run: ObservedRun) -> str:
    mean, oldest = _last(run, "train/avg_trajectory_age"), _last(run, "train/max_trajectory_age")
    if mean is None or oldest is None:
        return ""
    limit = run.setting("grpo.async_grpo.max_trajectory_age_steps")
    if run.setting("grpo.async_grpo.enabled") is False:
        limit = 0
    tokens = _last(run, "train/token_age/mean")
    text = f"groups {mean:.1f} steps old, the oldest {oldest:.0f}" + (f" (limit {limit})" if limit is not None else "")
    return text + (f", tokens {tokens:.1f}" if tokens is not None else "")


def _lost(run: ObservedRun) -> dict[str, float]:
    """Return the rollouts without a verdict over the whole run, by status."""
    prefix, counts = "train/rollout_status/", dict[str, float]()
    for record in run.records:
        for key, value in record.values.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in ("completed", "truncated") and value:
                counts[name] = counts.get(name, 0.0) + value
    return counts


def _failures(run: ObservedRun) -> str:
    total = sum(record.values.get("train/num_rollouts", 0.0) for record in run.records)
    if not total:
        return ""
    lost = _lost(run)
    masked = sum(record.values.get("train/num_masked_seqs_by_logprob_error", 0.0) for record in run.records)
    what = ", ".join(f"{count:.0f} {name}" for name, count in sorted(lost.items()))
    text = f"{sum(lost.values()):.0f} of {total:,.0f} rollouts without a verdict" + (f" ({what})" if what else "")
    return text + (f"; {masked:.0f} masked by the log-prob gap" if masked else "")


def _missing(run: ObservedRun) -> list[str]:
    """Say which engines, judges and rollout workers are not up, and why."""
    if run.status.is_over:
        return []
    return [f"{name}: {reason}" for name, reason in run.heartbeat.get("missing", {}).items()]


def _paused(run: ObservedRun) -> str:
    """Name the environments whose prompts wait because their rollouts ended without a verdict."""
    paused = run.heartbeat.get("paused", {})
    if not paused or run.status.is_over:
        return ""
    names = ", ".join(f"{name} for {format_seconds(seconds)}" for name, seconds in paused.items())
    waiting = run.heartbeat["set_aside"]
    return f"{names}: too many rollouts without a verdict; {waiting} prompts wait, one is tried at times"


def _saved(run: ObservedRun) -> str:
    if run.saved_step is None:
        return "nothing yet" if run.records else ""
    period = run.setting("checkpointing.save_period")
    due = (run.step // period + 1) * period if isinstance(period, int) and period > 0 else None
    coming = f", next at step {min(due, run.num_steps or due)}" if due and not run.status.is_over else ""
    return f"step {run.saved_step}, {_ago(run.now - run.saved_at)}{coming}"


def _shares(run: ObservedRun) -> str:
    """Return where the time of the recent steps went, largest first, and how idle the engines were."""
    recent = run.trained[-_RECENT:]
    spent = spent_by_phase(recent)
    total = sum(spent.values())
    if not total:
        return ""
    largest = sorted(((seconds / total, phase) for phase, seconds in spent.items()), reverse=True)
    shares = ", ".join(f"{phase} {share:.0%}" for share, phase in largest if share >= 0.01)
    idle = share_of_time(recent, "idle/generation")
    speed = _last(run, "performance/generation_tokens_per_sec")
    engines = f"; engines idle {idle:.0%}" if idle is not None else ""
    return f"{shares}{engines}" + (f", {speed:,.0f} tokens/s" if speed is not None else "")


def _unusual(run: ObservedRun) -> str:
    """Say when the phase that runs has taken far longer than it usually does."""
    key = TIMING_PREFIX + run.heartbeat["phase"]
    usual = [record.values[key] for record in run.trained[-_RECENT:] if key in record.values]
    if not usual or run.heartbeat["phase"] not in PHASES:
        return ""
    median = statistics.median(usual)
    return f" (usually {median:.1f} s)" if run.heartbeat["phase_seconds"] > 3 * median + 1 else ""


def _step_seconds(run: ObservedRun) -> float | None:
    totals = [record.values[TIMING_PREFIX + "total_step_time"] for record in run.trained if _has_total(record)]
    return statistics.median(totals[-_RECENT:]) if totals else None


def _has_total(record: StepRecord) -> bool:
    return TIMING_PREFIX + "total_step_time" in record.values


def _last(run: ObservedRun, key: str) -> float | None:
    return next((record.values[key] for record in reversed(run.records) if key in record.values), None)


def _ago(seconds: float) -> str:
    return f"{format_seconds(max(0.0, seconds))} ago"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="directory of the runs")
    parser.add_argument("--exp-name", default="", help="name of the run; default: the newest")
    parser.add_argument("--json", action="store_true", help="for scripts")
    return parser.parse_args(argv)


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Print the status of one run."""
    args = parse(argv)
    run_dir = find_run(args.results, args.exp_name)
    run = read_run(run_dir, ask_slurm(run_dir))
    console = Console()
    if args.json:
        print(json.dumps(as_json(run), indent=1))
    elif console.is_terminal:
        console.print(render(run))
    else:
        print(plain(run))
    return run.status.exit_code


if __name__ == "__main__":
    sys.exit(main())
