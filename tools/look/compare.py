"""Compares two runs bit for bit: what each step measured, and what each checkpoint holds.

    python -m tools.look.compare RUN_DIR RUN_DIR

With `policy.determinism: full` two runs of the same code, rows and seed are equal. Where they are not, this names the
first step that differs and what differs in it. Exit status 0: equal; 1: they differ; 2: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from recipes.errors import InputError, Problem
from recipes.grpo.checkpoint import complete_checkpoints, content_digest
from tools.command_line import exit_status
from tools.look.report.load import METRICS_FILE, load_steps

_OF_TIME = ("timing/", "performance/", "idle/", "generation_metrics/", "cluster/", "memory/")
_DURATION = "duration_s"
_MOST_NAMES = 5


def measured(run_dir: Path) -> dict[int, Mapping[str, float | str]]:
    """Return per step what a run measured and what no clock decides."""
    found: dict[int, Mapping[str, float | str]] = {}
    for record in load_steps(run_dir / METRICS_FILE):
        all_values: dict[str, float | str] = {**record.values, **record.non_finite}
        values = {name: value for name, value in all_values.items() if not name.startswith(_OF_TIME)}
        found[record.step] = {name: value for name, value in values.items() if _DURATION not in name}
    return found


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yield a line per step, and per checkpoint, that both runs have and in which they differ."""
    first, second = measured(one), measured(other)
    for step in sorted(first.keys() & second.keys()):
        names = sorted(first[step].keys() | second[step].keys())
        unequal = [name for name in names if first[step].get(name) != second[step].get(name)]
        shown = [f"{name} {first[step].get(name)} | {second[step].get(name)}" for name in unequal[:_MOST_NAMES]]
        if unequal[_MOST_NAMES:]:
            shown.append(f"and {len(unequal) - _MOST_NAMES} more")
        if unequal:
            yield f"step {step}: {', '.join(shown)}"
    for step, here, there in _checkpoints(one, other):
        if content_digest(here) != content_digest(there):
            yield f"checkpoint of step {step}: content {content_digest(here)[:16]} | {content_digest(there)[:16]}"


def _checkpoints(one: Path, other: Path) -> list[tuple[int, Path, Path]]:
    here, there = (complete_checkpoints(run / "checkpoints") for run in (one, other))
    return [(step, here[step], there[step]) for step in sorted(here.keys() & there.keys())]


def extent(one: Path, other: Path) -> str:
    """Say what can be compared. Raises `InputError` when two runs share no step."""
    steps = measured(one).keys() & measured(other).keys()
    if not steps:
        wrong, fix = f"it has no step that {one} has, so nothing can be compared", "name two runs that have done a step"
        raise InputError(Problem(where=str(other / METRICS_FILE), wrong=wrong, fix=fix))
    return f"{len(steps)} steps and {len(_checkpoints(one, other))} checkpoints"


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Compare two runs."""
    parser = argparse.ArgumentParser(prog="compare", description="Compare two runs bit for bit.")
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN_DIR")
    one, other = parser.parse_args(argv).runs
    what = extent(one, other)
    lines = list(differences(one, other))
    for line in lines:
        print(line)
    print(f"{what} of {one.name} and {other.name}: {'they differ' if lines else 'equal, bit for bit'}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
