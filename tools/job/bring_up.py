"""How long a job's parts may take to come up, when each was there, by which names, and what a missing one logged."""

from __future__ import annotations

import functools
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from recipes.files import write_atomically


def bring_up_seconds(num_nodes: int) -> float:
    """Return the time in which all parts must be there: images are imported, and a first job fills the caches."""
    return 1800.0 + 10.0 * num_nodes


def joined_names(missing: Sequence[str], expected: Sequence[str], joined: Mapping[str, str]) -> list[str]:
    """Return which of the missing nodes have joined; `joined` is host name -> address.

    A node of Slurm may have another name than its host. Then its address says which it is: `node.py` joins with the one
    that the node's name leads to.
    """
    known = {short(name) for name in expected}
    strangers = {address for host, address in joined.items() if host not in known}
    return [name for name in missing if short(name) in joined or (strangers and address_of(name) in strangers)]


@functools.cache
def address_of(host: str) -> str:
    """Return the address that a name leads to; empty where it leads to none."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    return ""


def short(host: str) -> str:
    """Return a host name without its domain."""
    return host.split(".")[0]


@dataclass(slots=True)
class Timeline:
    """When each part was there, in seconds since the job started; each is printed when it happens."""

    job_start: float  # Unix seconds
    events: dict[str, float] = field(default_factory=dict)

    def mark(self, event: str) -> None:
        """Record that something has happened now."""
        self.events[event] = round(time.time() - self.job_start, 1)
        print(f"barrier: +{self.events[event]:.1f} s: {event}", flush=True)

    def write(self, path: Path) -> None:
        """Write the events as JSON."""
        write_atomically(path, f"{json.dumps(self.events, indent=2)}\n".encode())


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "empty")
    return "no such file: the node has not started its part"


def report_missing(names: Sequence[str], what: str, log_dir: Path, pattern: str) -> None:
    """Name what is missing, each with the last line of its log."""
    for name in names:
        log = log_dir / pattern.format(node=name)
        print(f"barrier: {name} {what}; {log.name}: {last_line(log)}", file=sys.stderr)
