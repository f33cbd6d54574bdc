"""The directory of a job on one node, below /tmp: private, and gone when the job has ended.

    /tmp/rl-<job>-<restart>-<random>/     mode 0700, this user's; a local run has no job and restart in its name
        ray/                              Ray's own, which Ray opens to everybody
        logs_go_to                        the directory to which Ray's logs are copied at the end

Not in the run directory: the paths of Ray's Unix sockets may have at most 107 bytes.

A program that is killed cannot clear its directory. So it holds a lock on it as long as it lives, and whoever starts
next on the node clears the directories without a lock (`clear_abandoned`).
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
from recipes.files import lock_directory

PREFIX = "rl-"  # of the directories below /tmp
RAY = "ray"
_LOGS_GO_TO = "logs_go_to"


def make_private(path: Path, *, logs: Path) -> int:
    """Make the directory for this user alone and return the descriptor that holds its lock.

    `logs` is where Ray's logs are to be copied. Raises `LaunchError` when somebody, or an earlier start, was first.
    """
    lock = None
    while lock is None:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError as error:
            wrong = f"it exists already and belongs to user {path.lstat().st_uid}, so Ray's sockets cannot lie below it"
            raise LaunchError(Problem(where=str(path), wrong=wrong, fix="remove it, and start again")) from error
        lock = lock_directory(path)
        if lock is not None and not os.fstat(lock).st_nlink:
            os.close(lock)  # another start took the empty directory for an abandoned one
            lock = None
    (path / _LOGS_GO_TO).write_text(str(logs), encoding="utf-8")
    return lock


def clear_abandoned(parent: Path) -> None:
    """Remove this user's directories below `parent` that no program holds; copy their logs where they were to go."""
    for path in _own(parent):
        if (lock := lock_directory(path)) is None:
            continue
        with suppress(OSError):  # of an empty directory, whose start was killed while it made it
            path.rmdir()
        note = path / _LOGS_GO_TO
        if note.is_file():  # else it is not of this program, or of a version that took no lock
            target = Path(note.read_text(encoding="utf-8"))
            if target.parent.is_dir():
                keep_logs(path, target)
            else:  # the run itself has been removed
                shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _own(parent: Path) -> Iterator[Path]:
    """Yield the directories, not links to one, that have our prefix and are this user's."""
    for path in sorted(parent.glob(f"{PREFIX}*")):
        with suppress(OSError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                yield path


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
