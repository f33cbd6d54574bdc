"""Where the policy workers and generation engines run: Ray placement groups, placed before any actor is made.

The launcher gives every node `worker_units` equal to its accelerators (on a CPU machine: to its workers), so one
bookkeeping serves GPU and CPU clusters. A placement that cannot be met ends within its deadline and says what is
missing, instead of waiting for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recipes.errors import StalledError

_UNIT = "worker_units"
_HEAD = "node:__internal_head__"  # Ray's own mark of the node that the driver runs on

ActorOptions = dict[str, Any]
"""Keyword arguments of `Actor.options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many of what: from the configuration, never from what happens to be there."""

    num_train_nodes: int
    train_workers_per_node: int
    num_engines: int
    units_per_engine: int  # accelerators of one engine: TP * PP


def place(layout: Layout, *, deadline_seconds: float) -> tuple[list[ActorOptions], list[ActorOptions]]:
    """Reserve both sides; return actor options per policy rank and per engine."""
    workers = [layout.train_workers_per_node] * layout.num_train_nodes
    # Rank 0 beside the driver: what they exchange stays on one node, and the layout does not depend on Ray's mood.
    train = _reserve(workers, "policy workers", first={_HEAD: 0.001}, deadline_seconds=deadline_seconds)
    units = [layout.units_per_engine] * layout.num_engines
    engines = _reserve(units, "engines", first={}, deadline_seconds=deadline_seconds)
    num_workers = layout.num_train_nodes * layout.train_workers_per_node
    policy = [_options(train, rank // layout.train_workers_per_node, 1) for rank in range(num_workers)]
    return policy, [_options(engines, engine, layout.units_per_engine) for engine in range(layout.num_engines)]


def _reserve(units: list[int], what: str, *, first: dict[str, float], deadline_seconds: float) -> PlacementGroup:
    bundles = [{_UNIT: float(count), **({"GPU": float(count)} if _has_gpus() else {})} for count in units]
    bundles[0] |= first
    group = placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=deadline_seconds)
    except GetTimeoutError as late:
        remove_placement_group(group)
        free = [node["Resources"].get(_UNIT, 0.0) for node in ray.nodes() if node["Alive"]]
        raise StalledError(
            f"{what} need {len(units)} bundles of {max(units)} {_UNIT}, each on one node, but after "
            f"{deadline_seconds:g} s (deadlines.placement) they are not placed; the {len(free)} nodes have "
            f"{free} {_UNIT}. Ask for more nodes (SBATCH_NUM_NODES) or correct cluster.* and generation.colocated.*"
        ) from late
    return group


def _options(group: PlacementGroup, bundle: int, units: int) -> ActorOptions:
    return {
        "num_cpus": 0,
        "num_gpus": units if _has_gpus() else 0,
        "resources": {_UNIT: units},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }


def _has_gpus() -> bool:
    return bool(ray.cluster_resources().get("GPU", 0) > 0)
