"""Ask Slurm which jobs of a run are alive, so that two starts of one run never meet."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from tools.planning.run_dir import lock_problems, read_holder

DEADLINE_SECONDS = 10.0
_FILTERS = ("SQUEUE_", "SINFO_", "SACCT_")  # with which users set what these programs print for them
_UNKNOWN_JOB = "Invalid job id"  # squeue's answer for a job that ended a while ago


@dataclass(frozen=True, slots=True)
class LiveJob:
    """One job that waits, runs or ends."""

    job_id: str
    state: str


def asking_environment() -> dict[str, str]:
    """Return this environment without what would have Slurm's programs leave out jobs, as SQUEUE_STATES does."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)}


def live_jobs(*selection: str) -> list[LiveJob]:
    """Return the jobs that squeue lists for a selection; none where there is no Slurm.

    Raises `LaunchError` when the controller does not answer: then it is unknown.
    """
    command = ["squeue", "--noheader", "--all", "--format=%i|%T", *selection]  # also those in hidden partitions
    try:
        done = subprocess.run(
            command, env=asking_environment(), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired as error:
        raise _no_answer(f"it did not answer within {DEADLINE_SECONDS:g} s") from error
    if _UNKNOWN_JOB in done.stderr:
        return []
    if done.returncode != 0:
        raise _no_answer(done.stderr.strip() or f"it ended with status {done.returncode}")
    return [LiveJob(*line.strip().split("|", 1)) for line in done.stdout.splitlines() if line.strip()]


def _no_answer(wrong: str) -> LaunchError:
    return LaunchError(Problem(where="squeue", wrong=wrong, fix="try again when the controller answers"))


def run_problems(name: str, run_dir: Path) -> list[Problem]:
    """Return a problem for each live job of this run, and for a local run that holds the lock of its directory.

    The jobs are those of its name, and the one that its directory records.

    Raises `LaunchError` when the controller does not answer.
    """
    selections: list[tuple[str, ...]] = [(f"--user={os.getuid()}", f"--name={name}")]
    holder = read_holder(run_dir)
    if holder is not None and holder.job_id:
        selections.append((f"--jobs={holder.job_id}",))
    jobs = [job for selection in selections for job in live_jobs(*selection)]
    return in_progress(name, list(dict.fromkeys(jobs))) or lock_problems(run_dir)


def in_progress(name: str, jobs: Sequence[LiveJob]) -> list[Problem]:
    """Return the refusal of a second start, one per live job."""
    return [
        Problem(
            where=f"EXP_NAME={name}",
            wrong=f"job {job.job_id} of this run is {job.state}, and a name has one run at a time",
            fix=f"wait for its end, or scancel {job.job_id}, or choose another EXP_NAME",
        )
        for job in jobs
    ]
