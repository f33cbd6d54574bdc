"""What another user of the machine can do to a run: a program for that user, which prints what it should not have got.

It reads {"pids": [...], "places": [...]} from standard input and uses the standard library alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processes(pids: list[int]) -> Iterator[str]:
    """Try what one process can do to another."""
    for pid in pids:
        for name in ("environ", "maps", "fd"):
            with suppress(OSError):
                path = Path(f"/proc/{pid}/{name}")
                if list(path.iterdir()) if name == "fd" else path.read_bytes():  # of a process that ends, it is empty
                    yield f"read {path}"
        with suppress(OSError):
            os.kill(pid, 0)
            yield f"signal {pid}"


def files(places: list[str]) -> Iterator[str]:
    """Try to change what lies in these places, to connect to their sockets, and to open what others have locked.

    Whoever can open a file, if only to read it, can lock it as soon as nobody else has, and keep the lock.
    """
    locked = {int(inode) for inode in re.findall(r" \w+:\w+:(\d+) ", Path("/proc/locks").read_text(encoding="utf-8"))}
    walks = (walk for place in places for walk in os.walk(place))  # passes over what it cannot open
    below = (Path(folder, name) for folder, folders, names in walks for name in [*folders, *names])
    for path in (*map(Path, places), *below):
        with suppress(OSError):
            if os.access(path, os.W_OK) and not path.is_symlink():
                yield f"write {path}"
            if path.is_socket():
                socket.socket(socket.AF_UNIX).connect(str(path))
                yield f"connect to {path}"
            elif path.stat().st_ino in locked and is_locked(path):
                yield f"lock {path}"


def is_locked(path: Path) -> bool:
    """Say whether another process holds the lock of a file; raises `OSError` when this user cannot open it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def shared_memory() -> Iterator[str]:
    """Try to read or change memory that others share."""
    for path in Path("/dev/shm").iterdir():
        with suppress(OSError):
            is_open = os.access(path, os.R_OK) or os.access(path, os.W_OK)
            if is_open and path.stat().st_uid != os.getuid():
                yield f"open {path}"


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump([*processes(given["pids"]), *files(given["places"]), *shared_memory()], sys.stdout)
