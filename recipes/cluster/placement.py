"""Reserve the nodes on which policy workers, generation engines and judges run, before any actor is started.

The reservations are Ray placement groups. The launcher gives every node the Ray resource `worker_units`: as many as the
node has accelerators, or worker processes on a machine without any. So GPU and CPU clusters are counted alike. A
reservation that the cluster cannot fulfil fails at its deadline, and the error says what is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from recipes.errors import StalledError

_UNIT = "worker_units"
_FREE_SECONDS = 5.0  # in which Ray finds a place that is free
_HEAD = "node:__internal_head__"  # the resource that Ray gives to the node of the driver

ActorOptions = dict[str, Any]
"""Keyword arguments of `Actor.options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """How many workers a run needs. These come from the configuration, never from what the cluster has."""

    num_train_nodes: int
    train_workers_per_node: int
    num_engines: int
    units_per_engine: int  # accelerators of one engine: tensor parallel * pipeline parallel size
    units_of_judges: tuple[int, ...] = ()  # accelerators of each engine of a judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The actor options of every worker."""

    policy: list[ActorOptions]  # of each rank
    engines: list[ActorOptions]
    judges: list[ActorOptions]  # of each engine of a judge


def place(counts: WorkerCounts, *, deadline_seconds: float) -> Places:
    """Reserve all nodes for policy, engines and judges.

    Raises `StalledError` when the reservation is not fulfilled within `deadline_seconds`.
    """
    workers = [counts.train_workers_per_node] * counts.num_train_nodes
    # Rank 0 runs on the driver's node, so that what the two exchange never crosses the network.
    train = _reserve(workers, "policy workers", first={_HEAD: 0.001}, deadline_seconds=deadline_seconds)
    units = [counts.units_per_engine] * counts.num_engines
    engines = _reserve(units, "engines", first={}, deadline_seconds=deadline_seconds)
    num_workers = counts.num_train_nodes * counts.train_workers_per_node
    policy = [_options(train, rank // counts.train_workers_per_node, 1) for rank in range(num_workers)]
    judges = place_judges(counts.units_of_judges, deadline_seconds=deadline_seconds)
    generation = [_options(engines, engine, counts.units_per_engine) for engine in range(counts.num_engines)]
    return Places(policy=policy, engines=generation, judges=judges)


def place_judges(units: Sequence[int], *, deadline_seconds: float) -> list[ActorOptions]:
    """Reserve accelerators for each engine of a judge, the large ones first so that none finds only parts of nodes.

    Raises `StalledError` when the reservation is not fulfilled within `deadline_seconds`.
    """
    if not units:
        return []
    order = sorted(range(len(units)), key=lambda engine: -units[engine])
    sizes = [units[engine] for engine in order]
    group = _reserve(sizes, "engines of judges", first={}, deadline_seconds=deadline_seconds)
    bundles = {engine: bundle for bundle, engine in enumerate(order)}
    return [_options(group, bundles[engine], size) for engine, size in enumerate(units)]


class Place:
    """Where an actor is started; when it fails there, the next is started on another place, if one is free.

    The places that it leaves stay reserved: what has failed there would be tried by others.
    """

    def __init__(self, options: ActorOptions) -> None:
        self.options = options
        self._failed_on: set[str] = set()  # ids of nodes, since an actor was up

    def node(self) -> str:
        """Return the name of its node. Blocking."""
        return node_of(self.options)

    def was_good(self) -> None:
        """Note that an actor is up."""
        self._failed_on = set()

    def move(self) -> str:
        """Choose where the next actor is started, and say where. Blocking."""
        self._failed_on.add(_node_id_of(self.options))
        other = elsewhere(self.options, besides=self._failed_on)
        self.options = other or self.options
        return f"at {'another place' if other else 'the same place, for no other is free'}, on node {self.node()}"


def elsewhere(options: ActorOptions, *, besides: Collection[str]) -> ActorOptions | None:
    """Return the options of an actor as large at a free place of its own, as on a spare node; None: none is free.

    A place on the nodes `besides`, by their ids, is the last choice: their other accelerators may work.
    """
    units = options.get("resources", {}).get(_UNIT)
    if units is None:
        return None
    for selector in ({"ray.io/node-id": f"!in({','.join(sorted(besides))})"}, {}):
        group = placement_group([_bundle(units)], bundle_label_selector=[selector])
        try:
            ray.get(group.ready(), timeout=_FREE_SECONDS)
        except GetTimeoutError:
            remove_placement_group(group)
            continue
        return _options(group, 0, units)
    return None


def node_of(options: ActorOptions) -> str:
    """Return the name of the node on which an actor with these options is placed; empty when it has no place.

    In a job that is Slurm's name, which may differ from the host's; else Ray's own, an address, says less than this.
    """
    node = _node_id_of(options)
    return next((name_of(one) for one in ray.nodes() if one["NodeID"] == node), "")


def name_of(node: Mapping[str, Any]) -> str:
    """Return the name of an entry of `ray.nodes()`."""
    has_name = node["NodeName"] not in ("", node["NodeManagerAddress"])
    return str(node["NodeName"] if has_name else node["NodeManagerHostname"])


def _node_id_of(options: ActorOptions) -> str:
    strategy = options.get("scheduling_strategy")
    if isinstance(strategy, PlacementGroupSchedulingStrategy):
        found = placement_group_table(strategy.placement_group).get("bundles_to_node_id", {})
        return str(found.get(strategy.placement_group_bundle_index) or "")
    return str(getattr(strategy, "node_id", ""))


def spread(count: int | None) -> list[ActorOptions]:
    """Return the actor options of `count` rollout workers, node by node in turn; None: one on each node.

    They take no `worker_units`: those count accelerators, and a rollout worker runs on cores.
    """
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(_UNIT, 0.0))
    where = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
    return [{"num_cpus": 0, "scheduling_strategy": where[n % len(where)]} for n in range(count or len(where))]


def _reserve(units: list[int], what: str, *, first: dict[str, float], deadline_seconds: float) -> PlacementGroup:
    bundles = [_bundle(count) for count in units]
    bundles[0] |= first
    group = placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=deadline_seconds)
    except GetTimeoutError as late:
        remove_placement_group(group)
        free = [node["Resources"].get(_UNIT, 0.0) for node in ray.nodes() if node["Alive"]]
        raise StalledError(
            f"{what} need {len(units)} bundles of {max(units)} {_UNIT}, each on one node, but Ray has not placed them "
            f"within {deadline_seconds:g} s (deadlines.placement); the {len(free)} nodes have {free} {_UNIT}. "
            f"Ask for more nodes (SBATCH_NUM_NODES) or correct cluster.*, generation.colocated.* and "
            f"env.nemo_gym.num_gpu_nodes"
        ) from late
    return group


def _bundle(units: int) -> dict[str, float]:
    return {_UNIT: float(units), **({"GPU": float(units)} if _has_gpus() else {})}


def _options(group: PlacementGroup, bundle: int, units: int) -> ActorOptions:
    return {
        "num_cpus": 0,
        "num_gpus": units if _has_gpus() else 0,
        "resources": {_UNIT: units},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }


def _has_gpus() -> bool:
    return bool(ray.cluster_resources().get("GPU", 0) > 0)
