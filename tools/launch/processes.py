"""Find and end every process that a supervisor has started, however deep and however orphaned.

A supervisor that calls `adopt_orphans` becomes the parent of each descendant whose own parent died (Linux child
subreaper), also of those that left its session. Walking /proc from the supervisor therefore finds them all, and
nothing but them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHM = "/dev/shm/"


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def dies_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` after which the child gets signal `number` when its parent dies."""

    def arrange() -> None:
        _prctl(_PR_SET_PDEATHSIG, number)

    return arrange


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(root: int) -> list[int]:
    """List the process ids below `root`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # it ended while we looked
            continue
        # The command is in parentheses and may hold spaces; state and parent follow it.
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(0), [])
        found += below
        pending += below
    return found


def kill_descendants(*, deadline_seconds: float) -> list[int]:
    """Kill everything below this process and reap it; return what is left at the deadline (normally nothing)."""
    end = time.monotonic() + deadline_seconds
    while True:
        left = descendants(os.getpid())
        for pid in left:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        _reap()
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        if not left or time.monotonic() >= end:
            return left
        time.sleep(0.02)


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def shared_memory_files(pids: list[int]) -> set[Path]:
    """List the files under /dev/shm that any of `pids` has mapped or open."""
    found: set[Path] = set()
    for pid in pids:
        names: list[str] = []
        with suppress(OSError):  # it ended while we looked
            maps = Path(f"/proc/{pid}/maps").read_text()
            names += [line.partition(_SHM)[2] for line in maps.splitlines() if _SHM in line]
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed while we looked
                    target = str(descriptor.readlink())
                    names += [target.removeprefix(_SHM)] if target.startswith(_SHM) else []
        found |= {Path(_SHM + name) for name in names if not name.endswith(" (deleted)")}
    return found
