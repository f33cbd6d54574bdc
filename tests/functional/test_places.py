"""Where what has failed is started again, on a Ray cluster of three nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from speed import patiently

from recipes.cluster import placement
from recipes.cluster.placement import Place, place_judges

pytestmark = [pytest.mark.functional, pytest.mark.timeout(180)]

UNITS = 2  # of each node


@pytest.fixture(scope="module")
def nodes() -> Iterator[set[str]]:
    node = {"num_cpus": 1, "resources": {"worker_units": UNITS}}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for name in ("gpu-2", "gpu-3"):
        cluster.add_node(**node, node_name=name)
    ray.init(address=cluster.address)
    yield {one["NodeID"] for one in ray.nodes()}
    ray.shutdown()
    cluster.shutdown()


def test_another_node_is_tried_as_long_as_one_is_free_and_the_same_node_only_then(nodes: set[str]) -> None:
    """Half of each node is free: Ray's own choice would be the node that it has filled so far."""
    [options] = place_judges([1], deadline_seconds=patiently(20))
    found = Place(options)
    tried = [placement._node_id_of(found.options)]
    for _ in range(2):
        assert found.move().startswith("at another place, on node ")
        tried.append(placement._node_id_of(found.options))
    assert set(tried) == nodes, "three nodes, each once"
    assert {placement.name_of(one) for one in ray.nodes()} == {"gpu-2", "gpu-3", socket.gethostname()}
    said = [found.move() for _ in range(4)]
    words = [text.partition(", on node ")[0] for text in said]
    assert words == ["at another place"] * 3 + ["at the same place, for no other is free"]
    found.was_good()
    assert found.move().startswith("at the same place")
