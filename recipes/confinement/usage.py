"""What a jail uses, read from /proc: memory, CPU time, sockets and files of a process and all below it.

Read by hand: psutil is not in the sandbox image, and tells neither sockets, files nor how long a thread waits.

`OwnTime` tells a program that does not end from a machine that does not run it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name of the program, which may hold any characters.
STATE, USER_TIME, SYSTEM_TIME, ENDED_USER_TIME, ENDED_SYSTEM_TIME, RESIDENT_PAGES = 0, 11, 12, 13, 14, 21
RUNNABLE, STALLED = "R", "D"  # states of a thread that runs or wants to, and of one that the kernel holds up
NANOSECONDS = 1_000_000_000
TICK_SECONDS = 0.01  # the kernel counts what a thread ran only so often
LATEST_LOOK_SECONDS = 1.0  # after the one before; of a longer time the rest was lost to the server, too
MOST_WANTING = 2 * len(os.sched_getaffinity(0))  # threads that want a processor; more of them wait for each other


@dataclass(frozen=True, slots=True)
class ThreadTurns:
    """How long one thread ran, and how long it waited for a processor."""

    ran: float
    waited: float | None  # None where the kernel does not tell
    is_runnable: bool
    is_stalled: bool = False  # it waits for a disk, or for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class JailUsage:
    """What a tree of processes uses."""

    memory_bytes: int = 0  # resident
    cpu_seconds: float = 0.0  # with those of its processes that have ended
    sockets: int = 0  # in its network namespace
    files: int = 0  # in its /tmp and /dev/shm
    threads: Mapping[int, ThreadTurns] = field(default_factory=dict)


def usage_of(pid: int, disk_bytes: int = 0) -> JailUsage:
    """Return what a process and all below it use; nothing where it has ended.

    `disk_bytes` is the size of each file system of the jail, which tells them from those of the host: while the jail is
    made its processes still see both. Without it neither sockets nor files are counted.
    """
    pages, ticks = 0, 0
    threads: dict[int, ThreadTurns] = {}
    pending, last = [pid], pid
    while pending:
        current = pending.pop()
        try:
            fields = _fields_of(Path(f"/proc/{current}/stat"))
            tasks = list(Path(f"/proc/{current}/task").iterdir())
            children = [(task / "children").read_text(encoding="utf-8").split() for task in tasks]
            pending += [int(child) for found in children for child in found]
            threads |= {int(task.name): _turns(task, own) for task, own in zip(tasks, children, strict=True)}
        except OSError:  # it has ended meanwhile
            continue
        pages += int(fields[RESIDENT_PAGES])
        ticks += sum(int(fields[field]) for field in (USER_TIME, SYSTEM_TIME, ENDED_USER_TIME, ENDED_SYSTEM_TIME))
        last = current
    is_jail = last != pid and disk_bytes > 0
    return JailUsage(
        memory_bytes=pages * PAGE_BYTES,
        cpu_seconds=ticks / TICKS_PER_SECOND,
        sockets=_sockets(last) if is_jail else 0,
        files=_files(last, disk_bytes) if is_jail else 0,
        threads=threads,
    )


class OwnTime:
    """How many seconds a program has used of those that passed: it ran, or waited, but not for the machine.

    The others it lacked only because a processor or a disk was busy. What it had is seen in two ways, and the longer
    one counts: its processor time, and the share of their turns that its threads get. The second holds also for
    processes whose time is lost when they end, because their parent does not wait for them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before, self._looked = JailUsage(), time.monotonic()

    def add(self, usage: JailUsage) -> None:
        """Count the time since the last look."""
        now = time.monotonic()
        passed = min(now - self._looked, LATEST_LOOK_SECONDS)
        ran = max(0.0, usage.cpu_seconds - self._before.cpu_seconds)
        self.seconds += max(min(passed, ran), passed * share_of(usage.threads, self._before.threads))
        self._before, self._looked = usage, now


def share_of(threads: Mapping[int, ThreadTurns], before: Mapping[int, ThreadTurns]) -> float:
    """Return how much of one processor the threads had since the last look, between 0 and 1.

    All of it where they wait for themselves, and where so many want one that they wait for each other; nothing of it
    where the only one that does not wait for itself waits for a disk.
    """
    wanting = [number for number, turns in threads.items() if turns.is_runnable]
    if not wanting:
        return float(not any(turns.is_stalled for turns in threads.values()))
    if len(wanting) > MOST_WANTING:
        return 1.0
    share = 0.0
    for number in wanting:
        turns, last = threads[number], before.get(number)
        if turns.waited is not None:
            ran = max(turns.ran - (last.ran if last else 0.0), TICK_SECONDS)
            waited = max(turns.waited - ((last.waited or 0.0) if last else 0.0), 0.0)
            share += ran / (ran + waited)
    return min(share, 1.0)


def _turns(task: Path, children: Sequence[str]) -> ThreadTurns:
    """Return the turns of a thread. One that has begun a process with `vfork` looks stalled, too, until that ends."""
    state = _fields_of(task / "stat")[STATE]
    is_runnable, is_stalled = state == RUNNABLE, state == STALLED and not children
    try:
        ran, waited, _ = map(int, (task / "schedstat").read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return ThreadTurns(0.0, None, is_runnable, is_stalled)
    return ThreadTurns(ran / NANOSECONDS, waited / NANOSECONDS, is_runnable, is_stalled)


def _fields_of(path: Path) -> list[str]:
    """Return the fields of a file `stat` after the name: a process chooses it, and it need be no text."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _sockets(pid: int) -> int:
    try:
        words = Path(f"/proc/{pid}/net/sockstat").read_text(encoding="utf-8").split()
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
