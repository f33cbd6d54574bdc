"""How many threads a rank computes with."""

from __future__ import annotations

import pytest

from recipes.policy.policy import threads_per_rank
from recipes.policy.worker import WorkerIdentity


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
