"""Find and end every process below a supervisor, at any depth, also those whose parents have died.

A supervisor that calls `adopt_orphans` becomes the parent of each descendant whose own parent died (Linux child
subreaper), also of those that left its session. Walking the processes from the supervisor therefore finds them all, and
nothing but them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHM = "/dev/shm/"
_OPEN_FILES = 65536


def caught(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return those of the signals that this process may handle: under nohup, a hang-up stays ignored."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def dies_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` after which a child of this process gets signal `number` when this process dies.

    It may also be pickled and called in a spawned child. A child that this process has left already ends at once.
    """
    return partial(_die_with, os.getpid(), number)


def _die_with(parent: int, number: signal.Signals) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent has died before the call above
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def allow_open_files() -> None:
    """Raise the soft limit on open files for this process and those that it starts, as far as the hard one allows.

    Ray keeps connections from every worker to every other, and the soft limit is often 1024. At the limit Ray's servers
    try to accept again and again: whoever opens a thousand connections to one would take a core from the run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def children(parent: int) -> list[int]:
    """List the process ids of the children of a process."""
    return _below(parent, recursive=False)


def descendants(root: int) -> list[int]:
    """List the process ids below `root`, each after that of its parent."""
    return _below(root, recursive=True)


def _below(root: int, *, recursive: bool) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(root).children(recursive=recursive)]
    except psutil.NoSuchProcess:  # it has ended
        return []


def kill_descendants(*, deadline_seconds: float) -> list[int]:
    """Kill everything below this process and reap it; return what is left at the deadline (normally nothing)."""
    end = time.monotonic() + deadline_seconds
    while True:
        left = psutil.Process().children(recursive=True)
        for process in left:
            with suppress(psutil.NoSuchProcess):  # it ended by itself
                process.kill()
        _reap()
        left = [process for process in left if process.is_running()]
        if not left or time.monotonic() >= end:
            return [process.pid for process in left]
        time.sleep(0.02)


def reap_orphans(*, besides: Collection[int]) -> None:
    """Reap the adopted processes that have ended; `besides` are those that somebody else waits for.

    Without this they would stay in the table of processes for as long as the supervisor lives.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, options)) is not None and ended.si_pid not in besides:
            os.waitpid(ended.si_pid, 0)


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def shared_memory_inodes(pids: list[int]) -> set[int]:
    """List the inodes on /dev/shm that any of `pids` has mapped or open.

    Inodes, not names: a named semaphore is mapped under a temporary name that is gone once it has its own.
    """
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it ended while we looked
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            # address, permissions, offset, device, inode, path
            found |= {int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if _SHM in line}
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed while we looked
                    if str(descriptor.readlink()).startswith(_SHM):
                        found.add(descriptor.stat().st_ino)
    return found


def remove_shared_memory(inodes: set[int]) -> None:
    """Remove the files of `inodes` from /dev/shm, except those that any process still uses."""
    in_use = shared_memory_inodes(psutil.pids())
    for path in Path(_SHM).iterdir():
        with suppress(OSError):  # somebody else has removed it
            if path.stat().st_ino in inodes - in_use and path.is_file():
                path.unlink()
