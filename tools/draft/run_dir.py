"""The directory of one run: who may use it, and where each attempt logs.

results/<EXP_NAME>/.lock            held by the supervisor and the driver of the run in progress, with who they are
results/<EXP_NAME>/logs/attempt_N/  one per start, never overwritten; `latest` is the newest that had the run to itself
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from recipes.files import read_object
from tools.locks import NO_LOCKS

LOCK_FILE = ".lock"
# So long a requeued job waits for its own last start: its driver may still be dying. A file server may hold the lock of
# a dead node longer, or for ever.
OWN_SECONDS = 180.0
_POLL_SECONDS = 0.5
_LOCK_MODE = 0o600  # whoever may read a file may lock it, and so keep its run from ever starting again


class RunInProgressError(LaunchError):
    """Another process has the lock of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who locked a run last; the lock itself says whether that is still so."""

    pid: int
    host: str
    job_id: str = ""  # of Slurm; empty when started without it
    restart: int = 0  # how often Slurm had started that job again
    started: float = 0.0  # Unix seconds

    def __str__(self) -> str:
        job = f"job {self.job_id}, " if self.job_id else ""
        return f"{job}pid {self.pid} on {self.host}"


def this_process() -> Holder:
    """Return the record of the process that runs this."""
    job_id, restart = os.environ.get("SLURM_JOB_ID", ""), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return Holder(pid=os.getpid(), host=socket.gethostname(), job_id=job_id, restart=restart, started=time.time())


def read_holder(run_dir: Path) -> Holder | None:
    """Return who locked the run last, None when nobody has."""
    found = read_object(run_dir / LOCK_FILE)
    try:
        holder = Holder(**found)
    except TypeError:
        return None
    has_kinds = isinstance(holder.started, int | float) and all(type(n) is int for n in (holder.pid, holder.restart))
    return holder if has_kinds and isinstance(holder.host, str) and isinstance(holder.job_id, str) else None


def lock_run(run_dir: Path, *, own_seconds: float = OWN_SECONDS) -> int:
    """Lock the run and return the open descriptor; raises `RunInProgressError` when another process has the lock.

    The lock lasts as long as any process has the descriptor, so the driver inherits it: a supervisor that was killed
    does not free a run whose driver still trains. An earlier start of the same job is waited for; after `own_seconds`
    this start takes over, because Slurm starts a job again only when the nodes of its last start are gone.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + own_seconds
    while True:
        try:
            descriptor = _try_lock(run_dir)
            break
        except RunInProgressError:
            holder, own = read_holder(run_dir), this_process()
            if holder is None or not own.job_id or holder.job_id != own.job_id:
                raise
            if time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            elif own.restart > holder.restart:
                descriptor = _take_over(run_dir, own, holder)
                break
            else:
                raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(this_process())).encode(), 0)
    os.fsync(descriptor)
    return descriptor


def lock_problems(run_dir: Path) -> list[Problem]:
    """Return a problem when the run is in progress."""
    if not (run_dir / LOCK_FILE).exists():
        return []
    try:
        os.close(_try_lock(run_dir))
    except LaunchError as error:
        return error.problems
    return []


def _take_over(run_dir: Path, own: Holder, earlier: Holder) -> int:
    """Put a new, locked file in the place of the lock that a lost node seems to hold; return its descriptor."""
    path = run_dir / f"{LOCK_FILE}.{own.job_id}.{own.restart}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _LOCK_MODE)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path.replace(run_dir / LOCK_FILE)
    print(f"lock: taken over from restart {earlier.restart} of this job ({earlier}), which is lost", flush=True)
    return descriptor


def _try_lock(run_dir: Path) -> int:
    path = run_dir / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _LOCK_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != path.stat().st_ino:  # a later start took over between these two calls
            raise BlockingIOError(errno.EWOULDBLOCK, "replaced")
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunInProgressError(
            Problem(
                where=f"EXP_NAME={run_dir.name}",
                wrong=f"a run is in progress in {run_dir} (started by {read_holder(run_dir) or 'another process'})",
                fix="end that run first, or choose another EXP_NAME",
            )
        ) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            return descriptor  # jobs are kept apart by the ids in the file: live_jobs.py asks Slurm about them
        os.close(descriptor)
        raise
    return descriptor


def new_attempt(run_dir: Path) -> Path:
    """Create the next logs/attempt_N of a locked run and point logs/latest at it."""
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    names = [path.name.removeprefix("attempt_") for path in logs.glob("attempt_*")]
    numbers = [int(name) for name in names if name.isdecimal()]
    attempt = logs / f"attempt_{max(numbers, default=0) + 1}"
    attempt.mkdir()
    point_latest(attempt)
    return attempt


def point_latest(attempt: Path) -> None:
    """Point logs/latest at an attempt of the run that is locked; a start that is refused leaves it alone."""
    pointer = attempt.with_name(".latest.tmp")
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(attempt.name)
    pointer.replace(attempt.with_name("latest"))
