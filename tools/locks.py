"""Locks: one process at a time makes one thing."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from recipes.errors import LaunchError, Problem

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # Lustre mounted without -o flock answers ENOSYS


@contextmanager
def only_one(lock_file: Path) -> Iterator[None]:
    """Hold a lock that ends with this process; raises `LaunchError` when another process holds it."""
    is_held, is_new = False, not lock_file.parent.exists()
    while not is_held:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        # Its owner alone may open it: whoever may read a file may lock it, and so keep everybody else from the work.
        with os.fdopen(os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600), "ab") as file:
            _lock(lock_file, file)
            is_held = _is_at(lock_file, file)  # False when the process that held it has removed it since
            if is_held:
                try:
                    yield
                finally:
                    lock_file.unlink(missing_ok=True)
                    if is_new:
                        with suppress(OSError):  # a directory that is not empty stays
                            lock_file.parent.rmdir()


def _lock(path: Path, file: BinaryIO) -> None:
    if not try_lock(path, file):
        wrong, fix = "another process holds this lock and is at work here", "wait until it has finished"
        raise LaunchError(Problem(where=str(path), wrong=wrong, fix=fix))


def try_lock(path: Path, file: BinaryIO) -> bool:
    """Lock an open file; False when another process has it. Where the file system has no locks, say so and go on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{path}: this file system has no locks; start no second command that writes there")
    return True


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
