"""The directory of a node below /tmp that holds Ray's sockets and logs: private, and gone when the job has ended.

    /tmp/rl-<job>-<restart>-<random>/     mode 0700, this user's
        ray/                              Ray's own, which Ray opens to everybody

Not in the run directory: the paths of Ray's Unix sockets may have at most 107 bytes.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from recipes.errors import LaunchError, Problem

RAY = "ray"


def make_private(path: Path) -> None:
    """Make the directory for this user alone; raises `LaunchError` when somebody, or an earlier start, was first."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError as error:
        wrong = f"it exists already and belongs to user {path.lstat().st_uid}, so Ray's sockets cannot lie below it"
        raise LaunchError(Problem(where=str(path), wrong=wrong, fix="remove it, and start again")) from error


def earlier_starts(path: Path) -> Iterator[Path]:
    """Yield the directories that killed starts of the same job have left here; `path` is /tmp/rl-<job>-<restart>-..."""
    job = "-".join(path.name.split("-")[:2])
    yield from (other for other in path.parent.glob(f"{job}-*") if other != path and is_own(other))


def is_own(path: Path) -> bool:
    """Whether a path is a directory, not a link to one, of this user."""
    with suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def keep_logs(temp: Path, target: Path) -> None:
    """Copy the logs of Ray and its workers to `target`, then remove the directory."""
    for logs in temp.glob(f"{RAY}/session_2*/logs"):
        try:
            shutil.copytree(logs, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        except (OSError, shutil.Error) as error:  # a full disk must not hide how the run ended
            print(f"the logs in {logs} were not all copied: {error}", file=sys.stderr, flush=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink() and path.exists():  # Ray lets everybody write its directories
            path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
    shutil.rmtree(temp, ignore_errors=True)


def remove_sessions(temp: Path) -> None:
    """Remove what a Ray that did not start has left, so that the next one begins afresh."""
    for session in temp.glob(f"{RAY}/session_*"):
        if session.is_symlink():
            session.unlink()
        else:
            shutil.rmtree(session, ignore_errors=True)
