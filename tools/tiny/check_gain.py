"""Say whether a run has learned: held-out reward of the SFT checkpoint and of the trained policy.

    python -m tools.tiny.check_gain --run-dir results/X [--min-gain 0.25]

Reads metrics.jsonl: step 0 is the SFT checkpoint, the last validated step the trained policy, both measured on the
same rows. Exit status 1 when the gain of the sampled reward is too small, 2 when there is nothing to read.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import DataError, InputError, Problem
from tools.report.load import RunData, load_run

SAMPLED, GREEDY = "accuracy", "greedy_accuracy"
PREFIX = "validation/"


@dataclass(frozen=True, slots=True)
class Gain:
    """One held-out reward before and after training."""

    name: str
    before: float
    after: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def measure(run: RunData, where: Path) -> tuple[Gain, list[Gain]]:
    """Return the overall sampled gain, and all others that the run has measured."""
    overall = _gain(run, PREFIX + SAMPLED, "all, sampled")
    if overall is None:
        expected = f"{PREFIX}{SAMPLED} at step 0 and at a later step"
        fix = "run with grpo.val_at_start, grpo.val_at_end and data.validation.data_path"
        raise DataError(Problem(where=str(where / "metrics.jsonl"), got="less", expected=expected, fix=fix))
    candidates = [_gain(run, PREFIX + GREEDY, "all, greedy")]
    for agent in run.agents(PREFIX, f"/{SAMPLED}"):
        name = agent.removesuffix("_simple_agent")
        candidates.append(_gain(run, f"{PREFIX}{agent}/{SAMPLED}", f"{name}, sampled"))
        candidates.append(_gain(run, f"{PREFIX}{agent}/{GREEDY}", f"{name}, greedy"))
    return overall, [gain for gain in candidates if gain is not None]


def _gain(run: RunData, key: str, name: str) -> Gain | None:
    column = run.column(key)
    if len(column.steps) < 2 or column.steps[0] != 0:
        return None
    return Gain(name, column.values[0], column.values[-1])


def table(gains: list[Gain]) -> str:
    """Return aligned lines: name, before, after, gain."""
    width = max(len(gain.name) for gain in gains)
    header = f"{'held-out reward':<{width}}  {'SFT':>6} {'RL':>6} {'gain':>7}"
    return "\n".join([header, *(f"{g.name:<{width}}  {g.before:6.3f} {g.after:6.3f} {g.gain:+7.3f}" for g in gains)])


def places(run_dir: Path) -> str:
    """Return where the results of a run are."""
    latest = run_dir / "checkpoints" / "latest"
    checkpoint = latest.resolve() if latest.exists() else None
    entries = {
        "checkpoint": checkpoint,
        "HF export": checkpoint / "hf" if checkpoint else None,
        "report": run_dir / "report.html",
    }
    return "\n".join(
        f"{name + ':':<12}{path if path and path.exists() else 'not there'}" for name, path in entries.items()
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.check_gain", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run-dir", type=Path, required=True, help="results/<EXP_NAME>")
    parser.add_argument("--min-gain", type=float, default=0.25, help="of the overall sampled reward, absolute")
    options = parser.parse_args(arguments)
    try:
        overall, others = measure(load_run(options.run_dir), options.run_dir)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(table([overall, *others]))
    print(places(options.run_dir))
    if round(overall.gain, 6) < options.min_gain:
        message = f"the gain {overall.gain:+.3f} is below {options.min_gain:+.2f}: the run has not learned"
        print(message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
