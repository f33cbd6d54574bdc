"""How many threads a rank computes with, and the variables that it starts with."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.policy.policy import threads_per_rank, worker_variables
from recipes.policy.worker import WorkerIdentity
from tests.configuration import block


def identity(node: str, cores: int) -> WorkerIdentity:
    return WorkerIdentity(node_id=node, node_ip="", pid=0, num_cores=cores)


@pytest.mark.parametrize(
    ("ranks", "threads"),
    [
        ([("a", 2)], 2),
        ([("a", 2), ("a", 2)], 1),
        ([("a", 2), ("a", 2), ("a", 2)], 1),
        ([("a", 4), ("b", 2)], 2),
        ([("a", 64)], 4),
    ],
    ids=["alone", "two on a node", "more than cores", "the smallest node decides", "many cores"],
)
def test_the_ranks_of_a_node_share_its_cores(ranks: list[tuple[str, int]], threads: int) -> None:
    assert threads_per_rank([identity(*rank) for rank in ranks]) == threads


@pytest.mark.parametrize("asked", [None, {"CUDA_DEVICE_MAX_CONNECTIONS": 8}], ids=["default", "asked"])
def test_kernels_run_in_the_order_in_which_megatron_queues_them_unless_asked(asked: dict[str, Any] | None) -> None:
    found = worker_variables(block("policy", megatron_cfg=block("policy.megatron_cfg", env_vars=asked)))
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == ("8" if asked else "1")
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
