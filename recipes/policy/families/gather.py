"""Full tensors under Hugging Face names from the parts that the ranks of a replica hold.

A parameter lies on one pipeline stage, its shards on the tensor-parallel ranks of that stage, and other experts on
other expert-parallel ranks. One parameter after the other is sent to the other stages shard by shard, joined from its
shards, and, if it is an expert's, exchanged for those of the other experts. So every rank that takes part sees every
full tensor, and holds one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from recipes.policy.families.mapping import Sharding, WeightMapping, join, tensor_group

_Object = TypeVar("_Object")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One parameter of a pipeline stage, as each of its ranks has it."""

    stage: int
    index: int  # in the list of the ranks of that stage
    sharding: Sharding
    shape: tuple[int, ...]  # of a shard
    dtype: torch.dtype
    is_expert: bool
    names: tuple[tuple[str, ...], ...]  # the same ones, or for an expert those of each expert-parallel rank


def takes_part() -> bool:
    """Return whether this rank is of the ranks that must iterate `FullWeights.export` together with rank 0.

    Without experts that is the first replica. With experts spread over replicas it is the first replicas that have all
    of them. Ranks of a stage are numbered along tensor, context and data parallelism, and an expert's along tensor,
    expert and data parallelism.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    experts = (
        parallel_state.get_expert_model_parallel_world_size() * parallel_state.get_expert_tensor_parallel_world_size()
    )
    replicas = math.lcm(tensor, experts) // tensor
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) < replicas)


class FullWeights:
    """The model's full tensors, in an order that is the same on all ranks."""

    def __init__(self, mappings: Sequence[WeightMapping], config: TransformerConfig) -> None:
        """Exchange what each rank has; collective over all ranks."""
        self._mappings = mappings
        self._config = config
        self._parts = _all_parts(mappings)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return {name for part in self._parts for names in part.names for name in names}

    def shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and shape of what `export` yields, in its order and without communication."""
        result = []
        for part in self._parts:
            shards = [torch.empty(part.shape, dtype=part.dtype, device="meta")] * _num_shards(part)
            for which, full in enumerate(join(part.sharding, shards, self._config)):
                result += [(names[which], full.dtype, tuple(full.shape)) for names in part.names]
        return result

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor); collective over the ranks that `takes_part` names, to the end."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        experts = parallel_state.get_expert_model_parallel_group()
        for part in self._parts:
            shard = self._shard(part, stages)
            shards = _all_gather(shard, tensor_group(is_expert=part.is_expert)) if _num_shards(part) > 1 else [shard]
            for which, full in enumerate(join(part.sharding, shards, self._config)):
                copies = _all_gather(full, experts) if len(part.names) > 1 else [full]
                yield from zip((names[which] for names in part.names), copies, strict=True)

    def _shard(self, part: _Part, stages: dist.ProcessGroup) -> Tensor:
        """Return this tensor-parallel rank's shard, from the stage that has it."""
        if stages.size() == 1:
            return self._mappings[part.index].param.data
        if stages.rank() == part.stage:
            shard = self._mappings[part.index].param.data.contiguous()
        else:
            shard = torch.empty(part.shape, dtype=part.dtype, device=self._mappings[0].param.device)
        dist.broadcast(shard, dist.get_global_rank(stages, part.stage), group=stages)
        return shard


def _all_parts(mappings: Sequence[WeightMapping]) -> list[_Part]:
    """Describe the parameters of all stages; a tensor that two stages hold (a tied embedding) is listed once."""
    experts = parallel_state.get_expert_model_parallel_group()
    names_of_rank = _gather_objects([mapping.names for mapping in mappings], experts)
    stages = parallel_state.get_pipeline_model_parallel_group()
    own = [
        _Part(
            stage=stages.rank(),
            index=index,
            sharding=mapping.sharding,
            shape=tuple(mapping.param.shape),
            dtype=mapping.param.dtype,
            is_expert=mapping.is_expert,
            names=tuple(names[index] for names in names_of_rank) if mapping.is_expert else (mapping.names,),
        )
        for index, mapping in enumerate(mappings)
    ]
    seen: set[tuple[tuple[str, ...], ...]] = set()
    parts = []
    for part in (part for parts_of_stage in _gather_objects(own, stages) for part in parts_of_stage):
        if part.names not in seen:
            parts.append(part)
        seen.add(part.names)
    return parts


def _gather_objects(own: _Object, group: dist.ProcessGroup) -> list[_Object]:
    if group.size() == 1:
        return [own]
    objects: list[_Object] = [own] * group.size()
    dist.all_gather_object(objects, own, group=group)
    return objects


def _num_shards(part: _Part) -> int:
    return 1 if part.sharding is Sharding.REPLICATED else tensor_group(is_expert=part.is_expert).size()


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards
