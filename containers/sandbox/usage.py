"""What a jail uses, read from /proc: memory, CPU time, sockets and files of a process and all below it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name of the program, which may hold any characters.
USER_TIME, SYSTEM_TIME, ENDED_USER_TIME, ENDED_SYSTEM_TIME, RESIDENT_PAGES = 11, 12, 13, 14, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a tree of processes uses."""

    memory_bytes: int = 0  # resident
    cpu_seconds: float = 0.0  # with those of its processes that have ended
    sockets: int = 0  # in its network namespace
    files: int = 0  # in its /tmp and /dev/shm


def usage_of(pid: int, disk_bytes: int = 0) -> Usage:
    """Return what a process and all below it use; nothing where it has ended.

    `disk_bytes` is the size of each file system of the jail, which tells them from those of the host: while the jail is
    made its processes still see both.
    """
    pages = ticks = 0
    pending, last = [pid], pid
    while pending:
        current = pending.pop()
        try:
            # A process chooses its name, which need be no text.
            fields = Path(f"/proc/{current}/stat").read_text(errors="replace").rpartition(")")[2].split()
            tasks = list(Path(f"/proc/{current}/task").iterdir())
            pending += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # it has ended meanwhile
            continue
        pages += int(fields[RESIDENT_PAGES])
        ticks += sum(int(fields[field]) for field in (USER_TIME, SYSTEM_TIME, ENDED_USER_TIME, ENDED_SYSTEM_TIME))
        last = current
    return Usage(
        memory_bytes=pages * PAGE_BYTES,
        cpu_seconds=ticks / TICKS_PER_SECOND,
        sockets=_sockets(last) if last != pid else 0,
        files=_files(last, disk_bytes) if last != pid else 0,
    )


def _sockets(pid: int) -> int:
    try:
        words = Path(f"/proc/{pid}/net/sockstat").read_text().split()
        return int(words[2])  # "sockets: used N"
    except (OSError, ValueError, IndexError):
        return 0


def _files(pid: int, disk_bytes: int) -> int:
    try:
        places = [os.statvfs(f"/proc/{pid}/root{place}") for place in ("/tmp", "/dev/shm")]
    except OSError:
        return 0
    own = [place for place in places if place.f_blocks * place.f_frsize == disk_bytes]
    return sum(place.f_files - place.f_ffree for place in own)
