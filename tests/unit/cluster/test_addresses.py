"""How addresses are written, read and looked up, those of IPv6 too, and the interface by which ranks meet."""

from __future__ import annotations

import ast
import os
import re
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from recipes.cluster import ports
from recipes.cluster.ports import (
    address_of,
    connect,
    hold,
    hold_in_range,
    host_port,
    interface_of,
    split_host_port,
    url_of,
)
from recipes.config.keys.schema import is_http_url
from recipes.environments.agents.by_url.agent import UrlAgents
from recipes.environments.contract.http import JsonClient, RefusedError
from recipes.environments.sandbox.server import PROGRAM
from recipes.errors import ConfigError
from recipes.policy.worker import PolicyWorker
from recipes.sinks import PrometheusSink
from tests.configuration import block

ROOT = Path(__file__).resolve().parents[3]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")

WRITTEN = {
    "127.0.0.1": "127.0.0.1:80",
    "n1": "n1:80",
    "gpu_node-1.example.": "gpu_node-1.example.:80",
    "::1": "[::1]:80",
    "fd00::2": "[fd00::2]:80",
    "fe80::1%eth0": "[fe80::1%eth0]:80",
}


@pytest.mark.parametrize(("host", "written"), WRITTEN.items())
def test_an_address_is_read_as_it_was_written(host: str, written: str) -> None:
    assert host_port(host, 80) == written
    assert url_of(host, 80, "/v1") == f"http://{written}/v1"
    assert split_host_port(written) == (host, 80)


@pytest.mark.parametrize("text", ["", "n1", "n1:", ":80", "::1:80", "fd00::2:80", "[::1]", "[::1", "n1:0", "n1:99999",
                                  "n1:80/x", "a@n1:80", "n1:eighty"])  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_host_port(text)


LONGEST = ".".join(["a" * 49] * 5 + ["bcd"])
URLS = {
    "http://n1:80": True,
    "https://n1.example.": True,
    "http://gpu_node:80/v1": True,
    "http://N1:80": True,
    "http://[::1]:80": True,
    f"http://{LONGEST}": True,
    f"http://{LONGEST}.": True,
    f"http://{LONGEST}e": False,
    f"http://{'a' * 64}": False,  # a look-up raises no OSError for these two
    "http://a..b": False,
    "http://::1:80": False,
    "http://fd00::2:80": False,
    "http://[::1": False,
    "http://n1:99999": False,
    "http://": False,
    "n1:80": False,
}


@pytest.mark.parametrize(("url", "is_one"), URLS.items())
def test_a_url_that_no_client_can_ask_is_told_from_others(url: str, is_one: bool) -> None:
    assert len(LONGEST) == 253
    assert is_http_url(url) is is_one


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "no-such.invalid", "under_score.invalid", f"{LONGEST}.invalid"])
def test_a_name_that_leads_nowhere_is_one_kind_of_error(host: str) -> None:
    with pytest.raises(OSError):
        address_of(host)
    with pytest.raises(OSError):
        connect(host, 9, seconds=5.0)


@needs_ipv6
def test_ports_are_held_and_reached_on_ipv6() -> None:
    with (
        hold_in_range(20_300, 20_400, host="::1") as held,
        hold(held.getsockname()[1], host="127.0.0.1"),
        connect(*split_host_port(host_port(*held.getsockname()[:2])), seconds=5.0) as client,
    ):
        assert client.getpeername()[0] == "::1"


@needs_ipv6
async def test_servers_are_reached_on_ipv6(tmp_path: Path) -> None:
    agents, client = UrlAgents(), JsonClient()
    server = await agents.server_for("::1")
    session: Any = SimpleNamespace(end=lambda: None, num_calls=0)
    async with server.serving(session) as base_url:
        assert base_url.startswith("http://[::1]:")
        with pytest.raises(RefusedError, match="404"):
            await client.post(f"{base_url}/no/such/path", {})
    agents.close()
    with hold_in_range(20_300, 20_400, host="::1") as held:
        place = host_port(*held.getsockname()[:2])
    sink = PrometheusSink(place)
    with pytest.raises(RefusedError, match="answered"):
        await client.post(f"http://{place}/metrics", {})
    sink.close()
    for wrong in ("::1:8900", "127.0.0.1:0"):
        with pytest.raises(ConfigError, match=re.escape(f"prometheus_address: cannot listen at {wrong}: ")):
            PrometheusSink(wrong)
    await client.close()


@needs_ipv6
def test_the_sandbox_is_reached_on_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    program = runpy.run_path(str(PROGRAM), run_name="sandbox")
    for host, places in {"::1": ("::1",), "::": ("::1", "127.0.0.1"), "127.0.0.1": ("127.0.0.1",)}.items():
        with program["Server"]((host, 0), program["Handler"]) as server:
            for place in places:
                connect(place, server.server_port, seconds=5.0).close()


def test_an_ipv4_address_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [(socket.AF_INET6, 0, 0, "", ("fd00::2", 0, 0, 0))]
    monkeypatch.setattr(ports.socket, "getaddrinfo", lambda *_args, **_kwargs: found)
    assert address_of("n1") == "fd00::2"
    found.append((socket.AF_INET, 0, 0, "", ("10.0.0.1", 0)))
    assert address_of("n1") == "10.0.0.1"


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # of no machine
    assert interface_of("2001:db8::1") is None


@needs_ipv6
def test_the_interface_of_an_ipv6_address_is_found() -> None:
    assert interface_of("::1") == "lo"
    assert interface_of("0:0:0:0:0:0:0:1") == "lo"


HOST = re.compile(r"(?i)(host|addr|head|loopback|node_ip|names\[0\])")
# What is left: names of registries, which are HOST[:PORT] as their users write them, and an IPv4 constant.
ELSEWHERE = {
    "recipes/cluster/ports.py": "the functions themselves",
    "tools/draft/mounts.py": "a registry's name",
    "tools/task_images/registry/client.py": "a registry's name",
    "tools/task_images/registry/references.py": "a registry's name",
    "tools/json_server.py": "127.0.0.1",
}


def text_of(part: ast.expr | None) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else ""


def built_by_hand(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that put host and port together, take them apart, or look up IPv4 alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            around = [None, *node.values, None]
            for before, part, behind in zip(around, node.values, around[2:], strict=False):
                is_host = isinstance(part, ast.FormattedValue) and HOST.search(ast.unparse(part.value))
                if is_host and (text_of(before).endswith("://") or re.match(r":(\d|$)", text_of(behind))):
                    yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words, said = node.func.attr, ast.unparse(node)
            if words in ("partition", "rpartition", "split", "rsplit") and "':'" in said and HOST.search(said):
                yield node.lineno
            if words == "join" and ast.unparse(node.func.value) == "':'" and HOST.search(said):
                yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in ("gethostbyname", "AF_INET", "create_connection"):
            yield node.lineno


def test_addresses_are_built_and_read_in_one_place() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for place in ("recipes", "tools")
        for path in (ROOT / place).rglob("*.py")
        for line in built_by_hand(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {place.partition(":")[0] for place in found} == set(ELSEWHERE), sorted(found)


@pytest.mark.parametrize("source", ['f"{host}:{port}"', 'f"http://{self.address}:{port}/v1"', 'f"//{names[0]}:80"',
                                    'f"https://{head}"', 'address.rpartition(":")', '":".join(host_port)',
                                    "socket.gethostbyname(name)", "socket.socket(socket.AF_INET)"])  # fmt: skip
def test_what_is_built_by_hand_is_found(source: str) -> None:
    assert list(built_by_hand(ast.parse(source))) == [1]


@pytest.mark.parametrize(("is_one_node", "address", "expected"), [(True, "192.0.2.1", "lo"), (False, "127.0.0.1", "lo"),
                                                                  (False, "192.0.2.1", None)])  # fmt: skip
def test_ranks_of_several_nodes_meet_at_their_addresses_whatever_their_names_mean(
    monkeypatch: pytest.MonkeyPatch, is_one_node: bool, address: str, expected: str | None
) -> None:
    from recipes.policy import parallel

    def stop(*_: Any, **__: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(parallel, "connect_store", stop)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be restored")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    spec: Any = SimpleNamespace(
        num_threads=torch.get_num_threads(),
        is_one_node=is_one_node,
        collective_timeout_s=1.0,
        policy_cfg=block("policy"),
    )
    with pytest.raises(InterruptedError):
        PolicyWorker(0).start(spec, "host", 1)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
