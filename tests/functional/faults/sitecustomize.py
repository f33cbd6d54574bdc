"""Faults of the disk, for every program of a run that has this directory on PYTHONPATH: Python loads it by its name.

FAULTS_DIR/run      names the directory that the faults are for
FAULTS_DIR/synced   a line per file that was synced: inode and size
FAULTS_DIR/fail     while it exists, calls that change the directory fail now and then with the errno in it
"""

from __future__ import annotations

import os
import random
from typing import Any

_PLACE = os.environ.get("FAULTS_DIR", "")
_SHARE = 0.3  # of the calls that fail
_fsync = os.fsync


def _fail(path: Any, dir_fd: int | None = None) -> None:
    try:
        with open(f"{_PLACE}/fail", encoding="utf-8") as told, open(f"{_PLACE}/run", encoding="utf-8") as where:  # noqa: PTH123 # before anything is imported
            number, run = int(told.read()), where.read()
    except (OSError, ValueError):
        return
    descriptor = path if isinstance(path, int) else dir_fd
    name = os.fspath(path) if descriptor is None else os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    if str(name).startswith(run) and random.random() < _SHARE:
        raise OSError(number, os.strerror(number), str(name))


def fsync(descriptor: Any) -> None:
    """Sync, and remember what was."""
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    _fail(number)
    _fsync(number)
    found = os.fstat(number)
    log = os.open(f"{_PLACE}/synced", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, f"{found.st_ino} {found.st_size}\n".encode())
    os.close(log)


def _failing(call: Any) -> Any:
    def wrapped(path: Any, *args: Any, **options: Any) -> Any:
        _fail(path, options.get("dir_fd"))
        return call(path, *args, **options)

    return wrapped


if _PLACE:
    os.fsync = fsync
    for _name in ("mkdir", "replace", "rename", "rmdir", "unlink"):
        setattr(os, _name, _failing(getattr(os, _name)))
