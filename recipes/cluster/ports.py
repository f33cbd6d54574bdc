"""All TCP ports of a run in one table, functions that bind them, and how addresses are written, read and looked up.

All ports lie below 9000. Linux systems take the ports of outgoing connections from a range above that, so no outgoing
connection can take one of ours. `PORT_TABLE` lists the ports of one node. Ray's control ports are divided into slots of
20, so that several one-node clusters can share a machine: cluster s uses slot s, and its supervisor keeps the slot's
last port bound as a lock.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from recipes.errors import LaunchError, Problem

CEILING = 9000  # every port of a run is lower than this
NUM_SLOTS = 10
SANDBOX_PORT = 6000
_SLOT_WIDTH = 20
_SLOT_WORKER_PORTS = 100
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRange:
    """The ports from `low` up to, but not including, `high`, and what they are for."""

    name: str
    low: int
    high: int
    is_open: bool  # on a node of a job: all interfaces, else the node's own address in the job
    guard: str  # what a program that connects must have


AGENT_PORTS = PortRange(
    name="model servers of agents by URL", low=8300, high=8400, is_open=False, guard="a random path per rollout"
)
PORT_TABLE = (
    PortRange(
        name="Ray control: GCS, node and object managers, agents",
        low=1200,
        high=1400,
        is_open=True,
        guard="the job's token; whoever connects can read Ray's metrics",
    ),
    PortRange(name="torch rendezvous of the policy ranks", low=1400, high=2000, is_open=False, guard="nothing"),
    PortRange(name="Ray workers", low=2000, high=3000, is_open=True, guard="the job's token"),
    PortRange(
        name="generation engines: their clients and HTTP servers",
        low=3000,
        high=5000,
        is_open=False,
        guard="a random key, or VLLM_API_KEY",
    ),
    PortRange(name="environment servers", low=5000, high=6000, is_open=False, guard="nothing"),
    PortRange(name="sandbox entry", low=SANDBOX_PORT, high=SANDBOX_PORT + 1, is_open=True, guard="the sandbox's token"),
    PortRange(name="sandbox workers of NeMo-Skills", low=6001, high=7000, is_open=True, guard="nothing"),
    PortRange(name="Ray dashboard; never started", low=8265, high=8266, is_open=False, guard="the job's token"),
    AGENT_PORTS,
)


def port_rows() -> list[tuple[str, str, str, str]]:
    """Return ports, program, address in a Slurm job, and guard of each range, for people to read.

    A local run has every port on the loopback interface.
    """
    return [
        (
            f"{ports.low}-{ports.high - 1}" if ports.high > ports.low + 1 else f"{ports.low}",
            ports.name,
            "all interfaces" if ports.is_open else "the node's address",
            ports.guard,
        )
        for ports in PORT_TABLE
    ]


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
    autoscaler_metrics: int
    dashboard_metrics: int
    lock: int  # bound by the supervisor of a one-node cluster for as long as the cluster runs
    min_worker: int
    max_worker: int  # inclusive, as in Ray's own flag

    def flags(self, *, head: bool) -> list[str]:
        """Return the `ray start` flags that fix every port."""
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

    def variables(self) -> dict[str, str]:
        """Return the environment variables that fix the ports for which `ray start` has no flag; the head has these."""
        return {
            "AUTOSCALER_METRIC_PORT": str(self.autoscaler_metrics),
            "DASHBOARD_METRIC_PORT": str(self.dashboard_metrics),
        }

    def fixed(self, *, head: bool) -> list[int]:
        """List the ports that the node binds at its start, worker ports excepted."""
        node = [
            self.node_manager,
            self.object_manager,
            self.runtime_env_agent,
            self.dashboard_agent_grpc,
            self.metrics,
            self.dashboard_agent_listen,
        ]
        if not head:
            return node
        return [self.gcs, self.client, self.autoscaler_metrics, self.dashboard_metrics, *node]


def ray_ports(slot: int | None = None) -> RayPorts:
    """Return the ports of a node that runs one job only, or those of slot `slot` on a shared machine."""
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
        autoscaler_metrics=base + 9,
        dashboard_metrics=base + 10,
        lock=base + _SLOT_WIDTH - 1,
        min_worker=workers[0],
        max_worker=workers[1],
    )


def host_port(host: str, port: int) -> str:
    """Write HOST:PORT; an IPv6 address gets the brackets without which nobody can tell its end."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(host: str, port: int, path: str = "") -> str:
    """Write the URL of a server of ours."""
    return f"http://{host_port(host, port)}{path}"


def split_host_port(text: str) -> tuple[str, int]:
    """Read what `host_port` writes; raises `ValueError` for anything else, such as IPv6 without brackets."""
    host, port = "", 0
    with suppress(ValueError):
        place = urlsplit(f"//{text}")
        host, port = place.hostname or "", place.port or 0
    if not host or not port or place.netloc != text or "@" in text:
        raise ValueError(f"{text!r} is not HOST:PORT or [ADDRESS]:PORT")
    return host, port


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address; a name that is none counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_of(host: str) -> str:
    """Return the IPv4 address that a name leads to, else its IPv6 address; raises `OSError` where it leads to none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a host name: {error}") from error
    first = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(first[4][0])


def connect(host: str, port: int, *, seconds: float) -> socket.socket:
    """Connect to the address that a name leads to, or to one of its others; raises `OSError`."""
    try:
        return socket.create_connection((host, port), timeout=seconds)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a host name: {error}") from error


def interface_of(address: str) -> str | None:
    """Return the name of the interface of this machine that has an address; None where none has it."""
    import psutil  # only ranks on several nodes ask

    def read(text: str) -> object:
        return ipaddress.ip_address(text.partition("%")[0])

    for name, entries in psutil.net_if_addrs().items():
        own = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if read(address) in map(read, own):
            return str(name)
    return None


def hold(port: int, *, host: str = "") -> socket.socket:
    """Return a socket that listens on `port`; raises `LaunchError` naming the owner of a busy port.

    While the socket is open, no other process can take the port. The caller closes it or gives it to a server.
    """
    held = socket.socket(family_of(host), socket.SOCK_STREAM)
    # An earlier run's connections may linger in TIME_WAIT. Reuse ignores these, but never a port that is listened on.
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
    """Return a socket on the first free port of [low, high); raises `LaunchError` when all are in use."""
    for port in range(low, high):
        try:
            return hold(port, host=host)
        except LaunchError:
            continue
    raise LaunchError(
        Problem(
            where=f"ports {low}-{high - 1}",
            wrong=f"all {high - low} are in use, the first by {find_owner(low)}",
            fix="end the processes of earlier runs",
        )
    )


def busy_ports(ports: Iterable[int]) -> list[Problem]:
    """Return one problem per port that another process has; each names that process."""
    problems = []
    for port in ports:
        try:
            hold(port).close()
        except LaunchError as error:
            problems += error.problems
    return problems


def ephemeral_overlap(range_text: str) -> list[Problem]:
    """Check the content of `ip_local_port_range`: the kernel must not give ports of the table to other connections."""
    low, high = (int(word) for word in range_text.split())
    if low >= CEILING:
        return []
    return [
        Problem(
            where="net.ipv4.ip_local_port_range",
            got=f"{low} {high}",
            expected=f"a first port of at least {CEILING}, since the run uses lower ones",
            fix=f"sysctl -w net.ipv4.ip_local_port_range='{max(low, 32768)} {max(high, 60999)}'",
        )
    ]


def node_problems(ports: RayPorts, *, head: bool) -> list[Problem]:
    """Return every reason why a Ray node with these ports cannot start on this machine."""
    return ephemeral_overlap(EPHEMERAL_RANGE.read_text(encoding="utf-8")) + busy_ports(ports.fixed(head=head))


def find_owner(port: int) -> str:
    """Return "pid N (command)" of the process that has a TCP port, or what is known when the kernel hides it."""
    import psutil  # only to name who has a port

    using = []
    with suppress(psutil.Error, OSError):  # processes end while psutil reads about them
        using = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port]
    for pid in (one.pid for one in using if one.pid is not None):
        with suppress(psutil.Error):  # the process has ended
            return f"pid {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    is_open = any(one.status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED) for one in using)
    return "a process of another user" if is_open else "a connection that is closing"


def _busy(port: int) -> Problem:
    purpose = next((entry.name for entry in PORT_TABLE if entry.low <= port < entry.high), "not in the port table")
    return Problem(
        where=f"port {port} ({purpose})",
        wrong=f"in use by {find_owner(port)}",
        fix="end that process, or wait for it to end",
    )
