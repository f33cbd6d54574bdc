"""Wait until every node of a job has joined the Ray cluster and its sandbox answers, then become the driver.

At the deadline the barrier names every node that is missing, with the last line of its log. `bring_up.json` beside
the logs, and the driver's log, say how many seconds after the job's start each part was there.

A node that cannot be used says so in a file, `unusable_NODE` beside the logs, and stands by. With spare nodes the
barrier goes on without it, and, some time after enough nodes are there, without those that do not come. Those that are
spare and came stay in Ray: engines that fail elsewhere are started there.

How long a job's parts may take to come up, when each was there, by which names, and what a missing one logged.
"""

from __future__ import annotations

import argparse
import functools
import ipaddress
import json
import math
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from recipes.cluster.ports import (
    SANDBOX_PORT,
    address_of,
    connect,
    host_port,
    ray_ports,
    split_host_port,
    url_of,
)
from recipes.errors import BringUpError
from recipes.files import write_atomically
from recipes.stop import EXIT_RESUME, SIGNALS


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
    return [name for name in missing if short(name) in joined or (strangers and known_address(name) in strangers)]


@functools.cache
def known_address(host: str) -> str:
    """Return the address that a name leads to; empty where it leads to none."""
    with suppress(OSError):
        return address_of(host)
    return ""


def short(host: str) -> str:
    """Return a host name without its domain, in small letters; an address stays whole."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return host.split(".")[0].lower()


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
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "empty")
    return "no such file: the node has not started its part"


def note_unusable(log_dir: Path, problems: Sequence[str]) -> bool:
    """Tell the barrier why this node cannot be used; False when the job's directory takes no file from here."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with suppress(OSError):
        if (log_dir / NODES_FILE).is_file():  # else this is another directory of that name, on this node alone
            write_atomically(log_dir / f"{_UNUSABLE}{short(name)}", "; ".join(problems).encode())
            return True
    return False


def read_unusable(log_dir: Path, names: Sequence[str]) -> dict[str, str]:
    """Return why nodes of the job cannot be used, by name."""
    found = {}
    with suppress(OSError):
        there = {path.name: path for path in log_dir.glob(f"{_UNUSABLE}*")}
        for name in names:
            if (path := there.get(f"{_UNUSABLE}{short(name)}")) is not None:
                found[name] = path.read_text(encoding="utf-8", errors="replace")
    return found


def report_missing(names: Sequence[str], what: str, log_dir: Path, pattern: str) -> None:
    """Name what is missing, each with the last line of its log."""
    for name in names:
        log = log_dir / pattern.format(node=name)
        print(f"barrier: {name} {what}; {log.name}: {last_line(log)}", file=sys.stderr)


EXIT_NODE = BringUpError.exit_code  # for a node: another start leaves it out; see requeue.sh
# What late nodes get once enough are there: the lesser of these seconds, longer than a port is waited for, and this
# share of all the time.
GRACE_SECONDS, GRACE_SHARE = 120.0, 1 / 15
_SETTLE_SECONDS = 5.0  # in which all nodes that cannot be used have said so
_NOTES_SECONDS = 2.0  # between two looks for such notes, which the job's file system bears
_UNUSABLE = "unusable_"
NODES_FILE = "nodes"  # in the log directory: the names of the job's nodes
_POLL_SECONDS = 0.25
_PROBE_SECONDS = 5.0


@dataclass(slots=True)
class Nodes:
    """Which nodes of a job have joined Ray, which cannot be used, and whether to wait for more."""

    expected: Sequence[str]  # the head first
    num_spares: int
    log_dir: Path
    end: float  # monotonic
    grace_seconds: float
    missing: list[str] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    has_head: bool = False  # Ray answers there
    _looked_at: float = -math.inf

    def __post_init__(self) -> None:
        self.missing = list(self.expected)

    @property
    def suffice(self) -> bool:
        """Whether enough have joined, the head among them."""
        return len(self.missing) <= self.num_spares and self.expected[0] not in self.missing

    @property
    def can_suffice(self) -> bool:
        """Whether those of which nothing bad is known are enough."""
        return len(self.unusable) <= self.num_spares and self.expected[0] not in self.unusable

    @property
    def blamed(self) -> list[str]:
        """Those without which too few are there: of others nothing is known when the wait ended for them."""
        if self.suffice:
            return []
        if not self.can_suffice:
            return list(self.unusable)
        if not self.has_head:  # without which no other can join
            return [*self.unusable, self.expected[0]]
        return self.missing

    def wait_on(self) -> bool:
        """Look for notes of nodes that cannot be used; return whether to wait for more nodes."""
        now = time.monotonic()
        if now - self._looked_at >= _NOTES_SECONDS:
            self._looked_at, before = now, len(self.unusable)
            self.unusable = read_unusable(self.log_dir, self.missing)
            if len(self.unusable) > before:
                self.end = self.end if self.can_suffice else min(self.end, now + _SETTLE_SECONDS)
        return len(self.missing) > len(self.unusable) and now < self.end

    def joined(self, name: str) -> None:
        """Note a node that has joined; when these are enough, the others get some time."""
        was_enough, self.has_head = self.suffice, True
        self.missing.remove(name)
        if self.suffice and not was_enough:
            self.end = min(self.end, time.monotonic() + self.grace_seconds)

    def report(self) -> None:
        """Name every node that is missing, each with the reason or the last line of its log."""
        for name, reason in self.unusable.items():
            print(f"barrier: {name} cannot be used: {reason}", file=sys.stderr)
        silent = [name for name in self.missing if name not in self.unusable]
        head = [name for name in silent if name == self.expected[0]]
        report_missing(head, "has no Ray head", self.log_dir, "ray_head_{node}.log")
        others = [name for name in silent if name not in head]
        report_missing(others, "is not in Ray", self.log_dir, "ray_worker_{node}.log")


def wait_for_port(address: str, may_wait: Callable[[], bool]) -> bool:
    """Wait until the head listens; Ray's own connect gives up too early."""
    host, port = split_host_port(address)
    while may_wait():
        with suppress(OSError), connect(host, port, seconds=_PROBE_SECONDS):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def join(address: str, may_wait: Callable[[], bool]) -> bool:
    """Connect to the head, also to one that failed and was started once more; False when it is not to be waited for."""
    import ray  # takes as long as the head takes to listen

    while wait_for_port(address, may_wait):
        with suppress(ConnectionError):
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            return True
        time.sleep(_POLL_SECONDS)
    return False


def wait_for_nodes(address: str, nodes: Nodes, units: int, timeline: Timeline) -> None:
    """Wait until the nodes have joined with all their worker units, or are not to be waited for."""
    import ray

    if not join(address, nodes.wait_on):
        return
    nodes.has_head = True
    timeline.mark("the head listens")
    try:
        while True:
            joined = {
                short(node["NodeManagerHostname"]): str(node["NodeManagerAddress"])
                for node in ray.nodes()
                if node["Alive"] and node["Resources"].get("worker_units", 0) >= units
            }
            for name in joined_names(nodes.missing, nodes.expected, joined):
                nodes.joined(name)
                timeline.mark(f"{name} joined Ray")
            if not nodes.wait_on():
                return
            time.sleep(_POLL_SECONDS)
    finally:
        ray.shutdown()


def wait_for_sandboxes(expected: Sequence[str], end: float, timeline: Timeline) -> list[str]:
    """Return the nodes whose sandbox does not answer its health request when `end` (monotonic) comes."""
    missing = list(expected)
    with ThreadPoolExecutor(max_workers=min(32, len(missing))) as pool:
        while True:
            for name, is_up in zip(tuple(missing), pool.map(sandbox_answers, tuple(missing)), strict=True):
                if is_up:
                    missing.remove(name)
                    timeline.mark(f"{name} has a sandbox")
            if not missing or time.monotonic() >= end:
                return missing
            time.sleep(_POLL_SECONDS)


def sandbox_answers(host: str) -> bool:
    """Ask a node's sandbox for its health."""
    direct, url = urllib.request.build_opener(urllib.request.ProxyHandler({})), url_of(host, SANDBOX_PORT, "/health")
    with suppress(OSError), direct.open(url, timeout=_PROBE_SECONDS) as answer:
        return bool(answer.status == 200)
    return False


def give_up(names: Sequence[str], wrong: Sequence[str], timeline: Timeline) -> int:
    """Say which nodes are to blame, in the words that nodes.sh reads; return the status: all of them blames none."""
    seconds = time.time() - timeline.job_start
    blamed = ", ".join(f"node {name}" for name in wrong)
    print(f"barrier: given up {seconds:.0f} s after the start of the job because of {blamed}", file=sys.stderr)
    return EXIT_NODE if len(wrong) < len(names) else 1


def hold_signals() -> None:
    """Hold requests to stop until the driver's `StopRequest` takes them: it has no handler while Python starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Wait for all nodes of a job, then become the driver.")
    parser.add_argument("--nodes", type=Path, required=True, help="file with one host name per line, the head first")
    parser.add_argument("--units", type=int, required=True, help="worker units of each node")
    parser.add_argument("--spares", type=int, default=0, help="how many of them may be missing")
    parser.add_argument("--sandboxes", action="store_true", help="also wait for the sandbox of every node")
    parser.add_argument("--deadline", type=float, help="seconds; without it they grow with the number of nodes")
    parser.add_argument("command", nargs="+", help="the driver, after --")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Wait, then execute the driver in place of this process."""
    args = parse(argv)
    for number in SIGNALS:
        signal.signal(number, lambda *_: sys.exit(EXIT_RESUME))  # nothing to save yet
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # begin.py has held them
    names, log_dir = args.nodes.read_text(encoding="utf-8").split(), args.nodes.parent
    address = host_port(names[0], ray_ports().gcs)
    timeline = Timeline(job_start=float(os.environ.get("SLURM_JOB_START_TIME", time.time())))
    timeline.mark("the barrier waits")
    seconds = bring_up_seconds(len(names)) if args.deadline is None else args.deadline
    end = time.monotonic() + seconds
    nodes = Nodes(names, args.spares, log_dir, end, grace_seconds=min(GRACE_SECONDS, GRACE_SHARE * seconds))
    wait_for_nodes(address, nodes, args.units, timeline)
    nodes.report()
    there = [name for name in names if name not in nodes.missing]
    closed = wait_for_sandboxes(there, end, timeline) if args.sandboxes and nodes.suffice else []
    report_missing(closed, "has no sandbox that answers", log_dir, "sandbox_{node}.log")
    if closed or not nodes.suffice:
        return give_up(names, [*nodes.blamed, *closed], timeline)
    if nodes.missing:
        print(f"barrier: goes on with {len(there)} of {len(names)} nodes, {args.spares} spare", flush=True)
    timeline.mark("the driver starts")
    timeline.write(log_dir / "bring_up.json")
    hold_signals()
    os.environ["RAY_ADDRESS"] = address
    sys.stdout.flush()
    os.execvp(args.command[0], args.command)


if __name__ == "__main__":
    sys.exit(main())
