"""The directory of one run: who may use it, and where each attempt logs.

results/<EXP_NAME>/.lock            held by the supervisor and the driver of the run in progress
results/<EXP_NAME>/logs/attempt_N/  one per start, never overwritten; `latest` points at the newest
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from recipes.grpo.errors import LaunchError, Problem


def lock_run(run_dir: Path) -> int:
    """Lock the run and return the open descriptor; raises `LaunchError` when it is in progress.

    The lock lasts as long as any process has the descriptor, so the driver inherits it: a supervisor that was killed
    does not free a run whose driver still trains.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = _try_lock(run_dir)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def lock_problems(run_dir: Path) -> list[Problem]:
    """Return a problem when the run is in progress."""
    if not (run_dir / ".lock").exists():
        return []
    try:
        os.close(_try_lock(run_dir))
    except LaunchError as error:
        return error.problems
    return []


def _try_lock(run_dir: Path) -> int:
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise LaunchError(
            Problem(
                where=f"EXP_NAME={run_dir.name}",
                got=f"a run in progress in {run_dir} (started by {holder})",
                expected="one run of a name at a time",
                fix="end that run first, or choose another EXP_NAME",
            )
        ) from error
    return descriptor


def new_attempt(run_dir: Path) -> Path:
    """Create the next logs/attempt_N and point logs/latest at it."""
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name.removeprefix("attempt_")) for path in logs.glob("attempt_*")]
    attempt = logs / f"attempt_{max(numbers, default=0) + 1}"
    attempt.mkdir()
    pointer = logs / f".latest.{os.getpid()}"
    pointer.symlink_to(attempt.name)
    pointer.replace(logs / "latest")
    return attempt
