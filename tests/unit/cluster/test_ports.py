"""The port table is disjoint and low; held ports are exclusive; a clash names its owner."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys

import pytest

from recipes.cluster import ports
from recipes.errors import LaunchError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_table_is_disjoint_and_below_every_ephemeral_floor():
    ranges = sorted((entry.low, entry.high) for entry in ports.PORT_TABLE)
    assert all(low < high for low, high in ranges)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
    assert ranges[-1][1] <= 9000
    assert ranges[0][0] >= 1024  # no root needed


def in_table(port: int) -> bool:
    return any(entry.low <= port < entry.high for entry in ports.PORT_TABLE)


def test_slots_never_share_a_port():
    seen: set[int] = set()
    for slot in range(ports.NUM_SLOTS):
        node = ports.ray_ports(slot)
        taken = {*node.fixed(head=True), node.dashboard, node.lock, *range(node.min_worker, node.max_worker + 1)}
        assert len(taken) == 10 + 2 + 100
        assert not taken & seen
        assert all(in_table(port) for port in taken)
        seen |= taken


def test_cluster_node_has_the_published_ports():
    node = ports.ray_ports()
    assert (node.gcs, node.client, node.dashboard) == (1200, 1201, 8265)
    assert (node.min_worker, node.max_worker) == (2000, 2999)
    assert "--port=1200" in node.flags(head=True)
    assert not [flag for flag in node.flags(head=False) if "dashboard-port" in flag or flag.startswith("--port")]


def test_held_port_cannot_be_taken_and_the_error_names_this_process():
    port = free_port()
    with ports.hold(port), pytest.raises(LaunchError) as caught:
        ports.hold(port)
    assert f"port {port}" in str(caught.value)
    assert f"pid {os.getpid()}" in str(caught.value)
    ports.hold(port).close()  # and it is free again


def test_owner_in_another_process_is_named_with_its_command():
    code = "import socket,sys; s=socket.create_server(('',0)); print(s.getsockname()[1],flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        (problem,) = ports.busy_ports([port])
        server.communicate(b"")
    assert f"pid {server.pid}" in problem.wrong
    assert "socket.create_server" in problem.wrong


def test_range_skips_what_is_taken_and_fails_when_all_is():
    port = free_port()
    with ports.hold(port), ports.hold_in_range(port, port + 50) as second:
        assert port < second.getsockname()[1] < port + 50
        with pytest.raises(LaunchError, match="all 1 are in use, the first by pid"):
            ports.hold_in_range(port, port + 1)


def test_lingering_connections_do_not_make_a_port_busy():
    server = ports.hold(free_port())
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    accepted.close()  # the server closes first: its side stays in TIME_WAIT
    client.recv(1)
    client.close()
    server.close()
    assert ports.busy_ports([port]) == []


@pytest.mark.parametrize(("text", "count"), [("32768\t60999\n", 0), ("9000 65000", 0), ("1024 65535", 1)])
def test_ephemeral_range_below_the_ceiling_is_refused_with_the_command_that_fixes_it(text, count):
    problems = ports.ephemeral_overlap(text)
    assert len(problems) == count
    if problems:
        assert problems[0].fix == "sysctl -w net.ipv4.ip_local_port_range='32768 65535'"
