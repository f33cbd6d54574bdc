"""The interface of an address, by which ranks on several nodes meet."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from recipes.cluster.interfaces import interface_of
from recipes.policy.worker import PolicyWorker
from tests.configuration import block


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # of no machine


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
