"""The processes of a container, read from /proc of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat after the name of the program, which may hold any characters.
GROUP, START_TICKS, RESIDENT_PAGES = 2, 19, 21


@dataclass(frozen=True, slots=True)
class Running:
    """One process; numbers are those of this machine's process namespace."""

    pid: int
    group: int
    start_ticks: int  # when it was started; with its number it names it
    resident_bytes: int
    shell: int  # of the groups that were asked for, the one that it or the nearest process above it is in; else 0


def tree(root: int, shells: frozenset[int] = frozenset()) -> Iterator[Running]:
    """Yield a process and all below it; those that end meanwhile are left out. `shells` are process groups."""
    pending = [(root, 0)]
    while pending:
        pid, shell = pending.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            group = int(fields[GROUP])
            shell = group if group in shells else shell
            for task in Path(f"/proc/{pid}/task").iterdir():
                text = (task / "children").read_text(encoding="utf-8")
                pending += [(int(child), shell) for child in text.split()]
        except (OSError, IndexError, ValueError):
            continue
        resident = int(fields[RESIDENT_PAGES]) * PAGE_BYTES
        yield Running(pid, group, int(fields[START_TICKS]), resident, shell)


def number_inside(pid: int) -> int | None:
    """Return the number that a process has in its own process namespace."""
    with suppress(OSError):
        # A process chooses its name, which stands there first; of what ends a line the kernel hides only this one.
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return None


def proportional_bytes(pid: int) -> int | None:
    """Return the memory of a process, of shared pages its share; None where it has ended or cannot be read."""
    with suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def unnamed_memory_bytes(pid: int) -> dict[int, int]:
    """Return the memory files (memfd) that a process holds open: inode -> bytes."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(entry.readlink()).startswith("/memfd:"):
                    state = entry.stat()
                    found[state.st_ino] = state.st_blocks * 512
    return found


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
