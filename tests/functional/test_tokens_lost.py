"""Groups whose tokens lie on another node are known to be lost when that node dies, and those on this one are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import ray
from random_batch import random_rollouts
from ray.cluster_utils import Cluster
from speed import patiently

from recipes.cluster.token_store import RayTokenStore
from recipes.errors import TokensLostError
from recipes.tokens import GroupTokens, lost_groups
from tests.groups import as_lists, group_of

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(900)]

STORE_BYTES = 100 * 2**20


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    os.environ.pop("RAY_ADDRESS", None)
    limits = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**limits, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_groups_on_a_node_that_dies_are_found(cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=1, resources={"elsewhere": 1}, object_store_memory=STORE_BYTES)

    @ray.remote(num_cpus=0, resources={"elsewhere": 1})
    class Worker:
        def run_group(self, tokens: GroupTokens) -> tuple[str, GroupTokens]:
            return "header", tokens

    store, made = RayTokenStore(), group_of(random_rollouts(16, width=4000))
    worker: Any = cast(Any, Worker).remote()
    calls = [worker.run_group.options(num_returns=2).remote(made.tokens) for _ in range(2)]
    assert ray.get([header for header, _ in calls], timeout=patiently(120)) == ["header"] * 2
    groups = [replace(made, tokens=tokens) for _, tokens in calls]
    groups.append(replace(made, tokens=store.put(made.tokens)))

    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(TokensLostError, match="the tokens of 3 groups cannot be read from the object store"):
        store.get([group.tokens for group in groups])
    assert lost_groups(groups, store) == groups[:2]
    assert as_lists(store.get([groups[2].tokens])[0]) == as_lists(made.tokens)
