"""Full tensors under Hugging Face names from the parts that the ranks of a replica hold.

A parameter lies on one pipeline stage, its shards on the tensor-parallel ranks of that stage, and other experts on
other expert-parallel ranks. One parameter after the other is sent to the other stages shard by shard, joined from its
shards, and, if it is an expert's, exchanged for those of the other experts. So every rank that takes part sees every
full tensor, and holds one at a time.

For a push to engines the same matrix of the consecutive experts of one rank is one tensor, a block: Super's 40,960
expert tensors are 1,280 blocks then, each of which one broadcast brings to all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from recipes.policy.families.mapping import Sharding, TensorShape, WeightMapping, join, tensor_group
from recipes.types import PUSH_BUCKET_BYTES, experts_of

_Object = TypeVar("_Object")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameter:
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

    def __init__(self, mappings: Sequence[WeightMapping], config: TransformerConfig, where: torch.device) -> None:
        """Exchange what each rank has, some perhaps nothing; collective over all ranks. `where` its tensors lie."""
        self._where = where
        self._mappings = mappings
        self._config = config
        self._parts = _all_parts(mappings)
        self._runs = _runs(self._parts)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return {name for part in self._parts for names in part.names for name in names}

    def pushed_shapes(self) -> list[TensorShape]:
        """Return name, dtype and shape of what `pushed` yields, in its order and without communication."""
        return pushed_shapes(self._parts, self._config)

    @torch.no_grad()
    def pushed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) as engines get them, with experts in blocks; collective as `export`."""
        for run in self._runs:
            if not run[0].is_expert:
                yield from self._full(run[0])
                continue
            for owner, names in enumerate(_pushed_names(run)):
                stack = self._stack(run, owner)
                is_split = _num_shards(run[0]) > 1
                shards = _all_gather(stack, tensor_group(is_expert=True)) if is_split else [stack]
                yield from zip(names, _joined_stacks(run[0].sharding, shards, self._config), strict=True)

    def shapes(self) -> list[TensorShape]:
        """Return name, dtype and shape of what `export` yields, in its order and without communication."""
        return full_shapes(self._parts, self._config)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor); collective over the ranks that `takes_part` names, to the end."""
        for part in self._parts:
            yield from self._full(part)

    def _full(self, part: StageParameter) -> Iterator[tuple[str, Tensor]]:
        shard = self._shard(part)
        shards = _all_gather(shard, tensor_group(is_expert=part.is_expert)) if _num_shards(part) > 1 else [shard]
        experts = parallel_state.get_expert_model_parallel_group()
        for which, full in enumerate(join(part.sharding, shards, self._config)):
            copies = _all_gather(full, experts) if len(part.names) > 1 else [full]
            yield from zip((names[which] for names in part.names), copies, strict=True)

    def _stack(self, run: Sequence[StageParameter], owner: int) -> Tensor:
        """Return this tensor-parallel rank's shards of the experts of one expert-parallel rank, stacked."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        experts = parallel_state.get_expert_model_parallel_group()
        part = run[0]
        if stages.rank() == part.stage and experts.rank() == owner:
            stack = torch.stack([self._mappings[one.index].value() for one in run])
        else:
            stack = torch.empty((len(run), *part.shape), dtype=part.dtype, device=self._where)
        if stages.size() > 1 and experts.rank() == owner:
            dist.broadcast(stack, dist.get_global_rank(stages, part.stage), group=stages)
        if experts.size() > 1:
            dist.broadcast(stack, dist.get_global_rank(experts, owner), group=experts)
        return stack

    def _shard(self, part: StageParameter) -> Tensor:
        """Return this tensor-parallel rank's shard, from the stage that has it."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() == 1:
            return self._mappings[part.index].value()
        if stages.rank() == part.stage:
            shard = self._mappings[part.index].value().contiguous()
        else:
            shard = torch.empty(part.shape, dtype=part.dtype, device=self._where)
        dist.broadcast(shard, dist.get_global_rank(stages, part.stage), group=stages)
        return shard


def _all_parts(mappings: Sequence[WeightMapping]) -> list[StageParameter]:
    """Describe the parameters of all stages."""
    names_of_rank = _gather_objects(
        [mapping.names for mapping in mappings], parallel_state.get_expert_model_parallel_group()
    )
    stages = parallel_state.get_pipeline_model_parallel_group()
    return joined_stages(_gather_objects(parts_of_stage(mappings, names_of_rank, stages.rank()), stages))


def parts_of_stage(
    mappings: Sequence[WeightMapping], names_of_rank: Sequence[Sequence[tuple[str, ...]]], stage: int
) -> list[StageParameter]:
    """Describe the parameters of a pipeline stage; `names_of_rank` has those of each expert-parallel rank."""
    return [
        StageParameter(
            stage=stage,
            index=index,
            sharding=mapping.sharding,
            shape=tuple(mapping.param.shape),
            dtype=mapping.param.dtype,
            is_expert=mapping.is_expert,
            names=tuple(names[index] for names in names_of_rank) if mapping.is_expert else (mapping.names,),
        )
        for index, mapping in enumerate(mappings)
    ]


def joined_stages(parts_of_stages: Sequence[Sequence[StageParameter]]) -> list[StageParameter]:
    """Put the stages together; a tensor that two stages hold (a tied embedding) is listed once."""
    first: dict[tuple[tuple[str, ...], ...], StageParameter] = {}
    for part in (part for parts in parts_of_stages for part in parts):
        first.setdefault(part.names, part)
    return list(first.values())


def full_shapes(parts: Sequence[StageParameter], config: TransformerConfig) -> list[TensorShape]:
    """Return name, dtype and shape of the full tensors of all parts."""
    result = []
    for part in parts:
        shards = [torch.empty(part.shape, dtype=part.dtype, device="meta")] * _num_shards(part)
        for which, full in enumerate(join(part.sharding, shards, config)):
            result += [(names[which], full.dtype, tuple(full.shape)) for names in part.names]
    return result


def pushed_shapes(parts: Sequence[StageParameter], config: TransformerConfig) -> list[TensorShape]:
    """Return name, dtype and shape of what engines get, with experts in blocks."""
    shapes = {name: (dtype, shape) for name, dtype, shape in full_shapes(parts, config)}
    result = []
    for name in (name for run in _runs(parts) for names in _pushed_names(run) for name in names):
        experts = experts_of(name)
        dtype, shape = shapes[experts[0] if experts else name]
        result.append((name, dtype, (len(experts), *shape) if experts else shape))
    return result


def _runs(parts: Sequence[StageParameter]) -> list[list[StageParameter]]:
    """Put parameters together that are pushed as one: the same one of consecutive experts, as far as a bucket goes."""
    runs: list[list[StageParameter]] = []
    begun: dict[tuple[Any, ...], list[StageParameter]] = {}
    for part in parts:
        if not part.is_expert:
            runs.append([part])
            continue
        prefix, number, suffix = _numbered(part.names[0][0])
        size = part.dtype.itemsize * math.prod(part.shape) * _num_shards(part)
        key = part.stage, part.shape, part.dtype, prefix, suffix
        run = begun.get(key)
        is_next = run is not None and _numbered(run[-1].names[0][0])[1] + 1 == number
        if run is None or not is_next or (len(run) + 1) * size > PUSH_BUCKET_BYTES:
            run = begun[key] = []
            runs.append(run)
        run.append(part)
    return runs


def _pushed_names(run: Sequence[StageParameter]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the tensors of each expert-parallel rank."""
    if not run[0].is_expert:
        yield run[0].names[0]
        return
    for first, last in zip(run[0].names, run[-1].names, strict=True):
        pairs = zip(map(_numbered, first), map(_numbered, last), strict=True)
        yield tuple(f"{prefix}{number}-{end}{suffix}" for (prefix, number, suffix), (_, end, _) in pairs)


def _numbered(name: str) -> tuple[str, int, str]:
    """Return the name of an expert's tensor as its number, and what comes before and after it."""
    found = _EXPERT.fullmatch(name)
    assert found is not None, f"{name} has no number of an expert"
    return found[1], int(found[2]), found[3]


def _joined_stacks(sharding: Sharding, shards: list[Tensor], config: TransformerConfig) -> list[Tensor]:
    """Return the full tensors of several experts, stacked, from their stacked shards."""
    if len(shards) == 1 and sharding is not Sharding.GATE_UP:
        return shards
    each = [join(sharding, [shard[number] for shard in shards], config) for number in range(len(shards[0]))]
    return [torch.stack(list(one)) for one in zip(*each, strict=True)]


def _gather_objects(own: _Object, group: dist.ProcessGroup) -> list[_Object]:
    if group.size() == 1:
        return [own]
    objects: list[_Object] = [own] * group.size()
    dist.all_gather_object(objects, own, group=group)
    return objects


def _num_shards(part: StageParameter) -> int:
    return 1 if part.sharding is Sharding.REPLICATED else tensor_group(is_expert=part.is_expert).size()


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards
