"""Check whether a run has learned: compare the held-out reward of the SFT checkpoint and of the trained policy.

    python -m tools.tiny.check_gain --run-dir results/X [--min-gain 0.25]

Reads metrics.jsonl: step 0 is the SFT checkpoint, the last validated step is the trained policy; both are measured on
the same rows. Exit status 1 when the gain of the sampled reward is too small, 2 when the run has no such metrics.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import DataError, Problem
from tools.command_line import exit_status
from tools.look.report.load import RunData, load_run
from tools.look.report.page import GREEDY, SAMPLED, Gain, gain_of


def measure(run: RunData, where: Path) -> tuple[Gain, list[tuple[str, Gain]]]:
    """Return the overall sampled gain, and (name, gain) of everything that was validated at step 0 and later."""
    overall = _gain(run, SAMPLED)
    if overall is None:
        wrong = f"validation/{SAMPLED} was not measured at step 0 and at a later step"
        fix = "run with grpo.val_at_start, grpo.val_at_end and data.validation.data_path"
        raise DataError(Problem(where=str(where / "metrics.jsonl"), wrong=wrong, fix=fix))
    measured = [("all, sampled", overall), ("all, greedy", _gain(run, GREEDY))]
    for agent in run.agents("validation/", f"/{SAMPLED}"):
        name = agent.removesuffix("_simple_agent")
        measured.append((f"{name}, sampled", _gain(run, SAMPLED, agent)))
        measured.append((f"{name}, greedy", _gain(run, GREEDY, agent)))
    return overall, [(name, gain) for name, gain in measured if gain is not None]


def _gain(run: RunData, metric: str, agent: str = "") -> Gain | None:
    gain = gain_of(run, metric, agent)
    return gain if gain and gain.first_step == 0 < gain.last_step else None


def table(gains: Sequence[tuple[str, Gain]]) -> str:
    """Return aligned lines: name, before, after, gain."""
    width = max(len("held-out reward"), *(len(name) for name, _ in gains))
    lines = [f"{'held-out reward':<{width}}  {'SFT':>6} {'RL':>6} {'gain':>7}"]
    lines += [f"{name:<{width}}  {gain.before:6.3f} {gain.after:6.3f} {gain.delta:+7.3f}" for name, gain in gains]
    return "\n".join(lines)


def places(run_dir: Path) -> str:
    """Return the paths of a run's results."""
    latest = run_dir / "checkpoints" / "latest"
    checkpoint = latest.with_name(latest.resolve().name) if latest.exists() else None
    entries = {
        "checkpoint": checkpoint,
        "HF export": checkpoint / "hf" if checkpoint else None,
        "report": run_dir / "report.html",
    }
    return "\n".join(
        f"{name + ':':<12}{path if path and path.exists() else 'not there'}" for name, path in entries.items()
    )


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.check_gain", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run-dir", type=Path, required=True, help="results/<EXP_NAME>")
    parser.add_argument("--min-gain", type=float, default=0.25, help="smallest gain of the overall sampled reward")
    options = parser.parse_args(arguments)
    overall, gains = measure(load_run(options.run_dir), options.run_dir)
    print(table(gains))
    print(places(options.run_dir))
    if round(overall.delta, 6) < options.min_gain:
        message = f"the gain {overall.delta:+.3f} is below {options.min_gain:+.2f}: the run has not learned"
        print(message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
