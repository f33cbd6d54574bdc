"""Where the policy's ranks meet: on one address of the machine, at a port that nobody else can take."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from policy_case import load_case
from torch.distributed import HashStore

from recipes.policy.parallel import connect_store, join_groups, open_store

_NO_TIMEOUT = "EXPERT_DATA_PARALLEL_GROUP_GLOO"  # Megatron gives this one torch's; NCCL has no part in it


def test_ranks_meet_on_the_address_they_were_given() -> None:
    store = open_store("127.0.0.1", timeout_s=30)
    store.set("key", "value")
    assert connect_store("127.0.0.1", store.port, timeout_s=30).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=30)


def test_ranks_wait_for_each_other_for_the_same_time_in_every_group() -> None:
    from megatron.core import parallel_state

    cfg = load_case("any").policy.megatron_cfg
    join_groups(HashStore(), rank=0, world_size=1, cfg=cfg, seed=1, timeout_s=7200.0)
    try:
        groups = [group for group in parallel_state._global_process_group_list if group is not None]
        groups = [group for group in groups if group.group_desc != _NO_TIMEOUT]
        backends = [group._get_backend(torch.device("cpu")) for group in [dist.group.WORLD, *groups]]
        found = {backend.options._timeout for backend in backends}
    finally:
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()
    assert len(groups) > 10
    assert found == {timedelta(hours=2)}
