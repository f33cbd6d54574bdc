"""Ask Slurm which jobs of a run are alive, so that two starts of one run never meet.

What Slurm says about a run's jobs, asked with a deadline: a busy controller must not hang a status line.

Compare the time by which a run must save with the time that its job has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from recipes.stop import parse_duration
from tools.draft.contract import COUNTED
from tools.draft.run_dir import lock_problems, read_holder

ANSWER_SECONDS = 5.0
_QUEUED = "%i|%T|%r|%D|%M|%L|%B"
_ENDED = "JobID,State,ExitCode,NNodes,Elapsed"
ENDED_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One Slurm job."""

    id: str
    state: str  # PENDING, RUNNING, COMPLETED, ...
    reason: str  # why it waits; for an ended job why it ended
    num_nodes: str
    elapsed: str
    left: str  # until its time limit; empty when it has ended
    head: str  # host of the batch script; empty while it waits

    @property
    def is_over(self) -> bool:
        return self.state.split()[0] in ENDED_STATES

    def __str__(self) -> str:
        text = f"Slurm job {self.id} {self.state} on {self.num_nodes} nodes"
        if self.state == "PENDING":
            return f"Slurm job {self.id} PENDING ({self.reason}), {self.num_nodes} nodes"
        if self.is_over:
            return f"{text} after {self.elapsed} ({self.reason})"
        return f"{text} (head {self.head}), {self.elapsed} used, {self.left} left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The jobs found, running ones first, and what went wrong when asking."""

    jobs: tuple[SlurmJob, ...] = ()
    notes: tuple[str, ...] = ()
    has_answered: bool = False  # the controller did: a job that is not among them is no more
    asked_at: float | None = None  # Unix seconds; what is known of a job is of then. None: of now

    def job(self, job_id: str) -> SlurmJob | None:
        return next((job for job in self.jobs if job.id == job_id), None)

    @property
    def running(self) -> SlurmJob | None:
        return next((job for job in self.jobs if not job.is_over and job.state != "PENDING"), None)

    @property
    def pending(self) -> SlurmJob | None:
        return next((job for job in self.jobs if job.state == "PENDING"), None)


def read_queue(name: str, job_id: str) -> Queue:
    """Ask for the queued and running jobs of this name, and for `job_id` when it is no longer among them."""
    if shutil.which("squeue") is None:
        return Queue(notes=(f"squeue is not on this machine: nothing is known of job {job_id}",) if job_id else ())
    notes: list[str] = []
    asked_at = time.time()
    ask = ["squeue", "--noheader", "--all", f"--format={_QUEUED}"]  # also jobs in hidden partitions
    # Others may have jobs of this name, which the stage gives; theirs are found by the id that their run notes.
    jobs = [parse_queued(line) for line in _ask([*ask, f"--user={os.getuid()}", f"--name={name}"], notes)]
    if notes and not job_id:
        return Queue()  # programs of Slurm without a cluster, and no job to ask for
    jobs.sort(key=lambda job: job.state == "PENDING")
    has_answered = not notes
    if job_id and has_answered and not any(job.id == job_id for job in jobs):
        jobs += [parse_queued(line) for line in _ask([*ask, "--states=all", f"--jobs={job_id}"], [])]  # for minutes
    if job_id and not any(job.id == job_id for job in jobs) and shutil.which("sacct"):
        command = ["sacct", f"--jobs={job_id}", "--allocations", "--noheader", "--parsable2", f"--format={_ENDED}"]
        jobs += [parse_ended(line) for line in _ask(command, notes)]
    return Queue(jobs=tuple(jobs), notes=tuple(notes), has_answered=has_answered, asked_at=asked_at)


def parse_queued(line: str) -> SlurmJob:
    """Read one line of squeue."""
    job_id, state, reason, nodes, elapsed, left, head = (*line.split("|"), *[""] * 7)[:7]
    head = "" if head == "n/a" else head
    return SlurmJob(id=job_id, state=state, reason=reason, num_nodes=nodes, elapsed=elapsed, left=left, head=head)


def parse_ended(line: str) -> SlurmJob:
    """Read one line of sacct."""
    job_id, state, code, nodes, elapsed = (*line.split("|"), *[""] * 5)[:5]
    return SlurmJob(
        id=job_id, state=state, reason=f"exit code {code}", num_nodes=nodes, elapsed=elapsed, left="", head=""
    )


def _ask(command: Sequence[str], notes: list[str]) -> list[str]:
    try:
        result = _run(command, seconds=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        notes.append(f"{command[0]} did not answer within {ANSWER_SECONDS:g} s")
        return []
    if result.returncode:
        error = result.stderr.strip().splitlines()
        notes.append(f"{command[0]} failed: {error[-1] if error else f'status {result.returncode}'}")
    return [line for line in result.stdout.splitlines() if line.strip()]


SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
UNLIMITED = ("0", "infinite", "unlimited")
KEY = "checkpointing.checkpoint_must_save_by"
SIGNAL_SECONDS = 600  # from Slurm's signal to the end of the job: the driver finishes its step and saves


def walltime_problems(must_save_by: str | None, time_limit: str) -> list[Problem]:
    """Return a problem for a time limit that Slurm cannot read, or that ends before the run has to save."""
    if time_limit.lower() in UNLIMITED:
        return []
    seconds = slurm_seconds(time_limit)
    if seconds is None:
        expected = "minutes, [D-]H:M:S, M:S, D-H or D-H:M"
        return [Problem(where="SLURM_TIME_LIMIT", got=time_limit, expected=expected, fix="write e.g. 4:00:00")]
    if must_save_by is None or parse_duration(must_save_by) < seconds:
        return []
    expected = f"less than SLURM_TIME_LIMIT = {time_limit}"
    return [Problem(where=KEY, got=must_save_by, expected=expected, fix="the job would end before it saves; lower it")]


def slurm_seconds(text: str) -> int | None:
    """Return the seconds of a Slurm time, None for a text that is not one."""
    match = SLURM_TIME.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # M, M:S
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def signal_option(time_limit: str) -> tuple[str, ...]:
    """Return the option that makes Slurm signal the job before its end; nothing for a short limit.

    The driver itself stops in time for the end that the job had when it started; this is for a limit that was changed
    since. Slurm sends it up to a minute early.
    """
    limit = None if time_limit.lower() in UNLIMITED else slurm_seconds(time_limit)
    return () if limit is not None and limit < 4 * SIGNAL_SECONDS else (f"--signal=B:TERM@{SIGNAL_SECONDS}",)


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


def _run(command: Sequence[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command; raises `FileNotFoundError` and `subprocess.TimeoutExpired`."""
    return subprocess.run(
        command,
        env=asking_environment(),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=seconds,
        check=False,
    )


def live_jobs(*selection: str) -> list[LiveJob]:
    """Return the jobs that squeue lists for a selection; none where there is no Slurm.

    Raises `LaunchError` when the controller does not answer: then it is unknown.
    """
    command = ["squeue", "--noheader", "--all", "--format=%i|%T", *selection]  # also those in hidden partitions
    try:
        done = _run(command, seconds=DEADLINE_SECONDS)
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


GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)*?:(\d+)(?=[,(]|$)")  # gpu:8, gpu:h100:no_consume:8(S:0-1)


class NoAnswerError(Exception):
    """Slurm is not there, or did not answer in time."""


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command; raises `NoAnswerError` without the command, a controller or time."""
    if shutil.which(command[0]) is None:
        raise NoAnswerError(f"no command {command[0]}")
    try:
        result = _run(command, seconds=ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{command[0]} did not answer within {ANSWER_SECONDS:g} s") from error
    return result


def asked_gres(given: str) -> str:
    """Return the resource to ask for on each node; empty where none is: Slurm refuses one that it does not count."""
    if given != COUNTED:
        return given
    try:
        answer = ask("sinfo", "--noheader", "--all", "--format=%G")
    except NoAnswerError:
        return "gpu"
    counted = answer.stdout.split()
    return "" if answer.returncode == 0 and counted and not any(map(GPUS.search, counted)) else "gpu"
