"""Every TCP port of a run, in one table, and sockets that are bound and kept.

All ports lie below 9000, under the lowest ephemeral floor in use, so that no outgoing connection of the machine can
take one. `PORT_TABLE` holds what one node uses; Ray's own ports come in slots, so that several one-node clusters fit
on one machine: slot s of the first range is 20 ports, the last of which its supervisor holds as the slot's lock.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem

CEILING = 9000  # exclusive
NUM_SLOTS = 10
SANDBOX_PORT = 6000
_SLOT_WIDTH = 20
_SLOT_WORKER_PORTS = 100
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRange:
    """Ports [low, high) and who binds them."""

    name: str
    low: int
    high: int


PORT_TABLE = (
    PortRange(name="Ray control: GCS, node and object managers, agents", low=1200, high=1400),
    PortRange(name="torch rendezvous of the policy ranks", low=1400, high=2000),
    PortRange(name="Ray workers", low=2000, high=3000),
    PortRange(name="generation HTTP servers", low=3000, high=5000),
    PortRange(name="environment servers", low=5000, high=6000),
    PortRange(name="sandbox entry", low=SANDBOX_PORT, high=SANDBOX_PORT + 1),
    PortRange(name="sandbox workers", low=6001, high=7000),
    PortRange(name="vLLM rendezvous, 100 per engine", low=7000, high=8200),
    PortRange(name="Ray dashboard", low=8265, high=8266),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPorts:
    """The ports of one Ray node."""

    gcs: int
    client: int
    node_manager: int
    object_manager: int
    runtime_env_agent: int
    dashboard_agent_grpc: int
    metrics: int
    dashboard_agent_listen: int
    dashboard: int
    lock: int  # held by the supervisor of a one-node cluster
    min_worker: int
    max_worker: int  # inclusive, as Ray counts

    def flags(self, *, head: bool) -> list[str]:
        """Return the `ray start` flags that pin every port."""
        flags = [
            f"--node-manager-port={self.node_manager}",
            f"--object-manager-port={self.object_manager}",
            f"--runtime-env-agent-port={self.runtime_env_agent}",
            f"--dashboard-agent-grpc-port={self.dashboard_agent_grpc}",
            f"--metrics-export-port={self.metrics}",
            f"--dashboard-agent-listen-port={self.dashboard_agent_listen}",
            f"--min-worker-port={self.min_worker}",
            f"--max-worker-port={self.max_worker}",
        ]
        if not head:
            return flags
        return [
            f"--port={self.gcs}",
            f"--ray-client-server-port={self.client}",
            f"--dashboard-port={self.dashboard}",
            *flags,
        ]

    def fixed(self, *, head: bool) -> list[int]:
        """List the single ports that the node binds at start."""
        node = [
            self.node_manager,
            self.object_manager,
            self.runtime_env_agent,
            self.dashboard_agent_grpc,
            self.metrics,
            self.dashboard_agent_listen,
        ]
        return [self.gcs, self.client, *node] if head else node


def ray_ports(slot: int | None = None) -> RayPorts:
    """Return the ports of a node that one job has to itself, or of slot `slot` of a shared machine."""
    base = 1200 + _SLOT_WIDTH * (slot or 0)
    workers = (2000, 2999) if slot is None else (2000 + _SLOT_WORKER_PORTS * slot, 2099 + _SLOT_WORKER_PORTS * slot)
    return RayPorts(
        gcs=base,
        client=base + 1,
        node_manager=base + 2,
        object_manager=base + 3,
        runtime_env_agent=base + 4,
        dashboard_agent_grpc=base + 5,
        metrics=base + 6,
        dashboard_agent_listen=base + 7,
        dashboard=8265 if slot is None else base + 8,
        lock=base + _SLOT_WIDTH - 1,
        min_worker=workers[0],
        max_worker=workers[1],
    )


def hold(port: int, *, host: str = "") -> socket.socket:
    """Bind `port` and listen, which nobody else can then do; raises `LaunchError` naming the owner of a busy port.

    The caller keeps the socket, or hands it to the server that is to answer on it.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Reuse is for connections of an earlier run that linger in TIME_WAIT; a listener excludes every other one.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
        held.listen(128)
    except OSError as error:
        held.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise LaunchError(_busy(port)) from error
    return held


def hold_in_range(low: int, high: int, *, host: str = "") -> socket.socket:
    """Hold the first free port of [low, high); raises `LaunchError` when there is none."""
    for port in range(low, high):
        try:
            return hold(port, host=host)
        except LaunchError:
            continue
    raise LaunchError(
        Problem(
            where=f"ports {low}-{high - 1}",
            got=f"all {high - low} in use, the first by {find_owner(low)}",
            expected="a free port",
            fix="end the processes of earlier runs",
        )
    )


def busy_ports(ports: Iterable[int]) -> list[Problem]:
    """Return one problem per port that somebody else has, each naming the owner."""
    problems = []
    for port in ports:
        try:
            hold(port).close()
        except LaunchError as error:
            problems += error.problems
    return problems


def ephemeral_overlap(range_text: str) -> list[Problem]:
    """Check the content of `ip_local_port_range`: the kernel must not hand out ports of the table."""
    low, high = (int(word) for word in range_text.split())
    if low >= CEILING:
        return []
    return [
        Problem(
            where="net.ipv4.ip_local_port_range",
            got=f"{low} {high}",
            expected=f"a floor of at least {CEILING}: lower ports are the run's own",
            fix=f"sysctl -w net.ipv4.ip_local_port_range='{max(low, 32768)} {max(high, 60999)}'",
        )
    ]


def node_problems(ports: RayPorts, *, head: bool) -> list[Problem]:
    """Return what would keep a Ray node with these ports from starting on this machine."""
    return ephemeral_overlap(EPHEMERAL_RANGE.read_text()) + busy_ports(ports.fixed(head=head))


def find_owner(port: int) -> str:
    """Name the process that has a TCP port, as "pid N (command)"; says so where the kernel hides it."""
    inodes = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked, or belongs to another user
            if inodes & set(_descriptors(process)):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {process.name} ({command[:120]})"
    return "a process of another user" if inodes else "a connection that is closing"


def _descriptors(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # closed while we looked
            yield str(descriptor.readlink())


def _inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if int(words[1].rsplit(":", 1)[1], 16) == port and words[9] != "0":
                found.add(words[9])
    return found


def _busy(port: int) -> Problem:
    purpose = next((entry.name for entry in PORT_TABLE if entry.low <= port < entry.high), "no part of the port table")
    return Problem(
        where=f"port {port} ({purpose})",
        got=f"in use by {find_owner(port)}",
        expected="a free port",
        fix="end that process, or wait for it to end",
    )
