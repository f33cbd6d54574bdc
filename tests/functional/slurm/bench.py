"""`make bench`: how long a job of two nodes takes until its driver starts, and where the time goes.

On a throw-away Slurm cluster of this machine, with a driver that ends at once. Two nodes share its cores here, so a
real cluster is faster in all but what its network and containers add.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slurm.cluster import Cluster
from slurm.jobs import submit

LIMIT_SECONDS = 30.0
JOB_SECONDS = 180.0


def bring_up(cluster: Cluster, run_dir: Path) -> dict[str, float]:
    """Run one job; return what happened when, in seconds since its start."""
    job = submit(cluster, run_dir, driver=["-c", "pass"])
    state = job.wait(seconds=JOB_SECONDS)
    if state != "COMPLETED":
        raise RuntimeError(f"the job ended as {state}:\n{job.everything()}")
    events: dict[str, float] = json.loads(
        (run_dir / "logs" / "attempt_1" / "bring_up.json").read_text(encoding="utf-8")
    )
    return events


def table(starts: Sequence[dict[str, float]]) -> str:
    """Return the events of all starts, each with its median."""
    lines = [f"{'seconds after the start of a job of two nodes':<46}  median  each"]
    for event in starts[0]:
        times = [start[event] for start in starts]
        lines.append(f"{event:<46}  {statistics.median(times):6.1f}  {'  '.join(f'{time:.1f}' for time in times)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge: 1 when the driver starts too late."""
    parser = argparse.ArgumentParser(prog="python -m slurm.bench", description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="slurm-bench-") as name:
        directory = Path(name)
        with Cluster(shared=[directory]) as cluster:
            starts = [bring_up(cluster, directory / f"run{number}") for number in range(args.starts)]
    print(table(starts))
    slowest = statistics.median(start["the driver starts"] for start in starts)
    is_kept = slowest <= LIMIT_SECONDS
    print(f"driver starts after {slowest:.1f} s, limit {LIMIT_SECONDS:g} s: {'ok' if is_kept else 'ABOVE'}")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
