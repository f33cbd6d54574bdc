"""What Slurm says about a run's jobs, asked with a deadline: a busy controller must not hang a status line."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tools.planning.live_jobs import asking_environment

DEADLINE_SECONDS = 5.0
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
        result = subprocess.run(
            command,
            env=asking_environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        notes.append(f"{command[0]} did not answer within {DEADLINE_SECONDS:g} s")
        return []
    if result.returncode:
        error = result.stderr.strip().splitlines()
        notes.append(f"{command[0]} failed: {error[-1] if error else f'status {result.returncode}'}")
    return [line for line in result.stdout.splitlines() if line.strip()]
