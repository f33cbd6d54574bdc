"""Hugging Face <-> Megatron weights, one parameter at a time, whatever the model family.

Megatron fuses query, key and value per query group, and gate with up projection; tensor parallelism then splits them.
A family lists its parameters as `WeightMapping`s; `load` fills them from full tensors, `export` yields full tensors
under Hugging Face names on every rank of a data-parallel replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Sharding(StrEnum):
    """How a Megatron parameter is made of its Hugging Face tensors, and what tensor parallelism splits."""

    QKV = "qkv"  # per query group: its query heads, key, value; groups are split
    GATE_UP = "gate_up"  # gate rows, then up rows; each is split
    ROWS = "rows"  # output dimension split
    COLUMNS = "columns"  # input dimension split
    MAMBA_IN = "mamba_in"  # rows of z, x, B, C, dt; each is split
    MAMBA_CONV = "mamba_conv"  # rows of x, B, C; each is split
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMapping:
    """One parameter or buffer of this rank and the full tensors that it is a part of."""

    param: Tensor
    sharding: Sharding
    names: tuple[str, ...]  # Hugging Face names


@torch.no_grad()
def load(mappings: Sequence[WeightMapping], config: TransformerConfig, read: Callable[[str], Tensor]) -> None:
    """Fill every parameter from full tensors that `read` returns by Hugging Face name."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for mapping in mappings:
        full = [read(name) for name in mapping.names]
        mapping.param.copy_(_split(mapping.sharding, full, config, size=size, rank=rank).view_as(mapping.param))


@torch.no_grad()
def export(mappings: Sequence[WeightMapping], config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor); collective over the tensor-parallel group."""
    group = parallel_state.get_tensor_model_parallel_group()
    for mapping in mappings:
        local = mapping.param.data
        shards = [local] if mapping.sharding is Sharding.REPLICATED else _all_gather(local, group)
        yield from zip(mapping.names, _join(mapping.sharding, shards, config), strict=True)


def full_shapes(
    mappings: Sequence[WeightMapping], config: TransformerConfig
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of what `export` yields, in its order and without communication."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    result = []
    for mapping in mappings:
        shards = [torch.empty(mapping.param.shape, dtype=mapping.param.dtype, device="meta")] * (
            1 if mapping.sharding is Sharding.REPLICATED else size
        )
        for name, full in zip(mapping.names, _join(mapping.sharding, shards, config), strict=True):
            result.append((name, full.dtype, tuple(full.shape)))
    return result


def _split(sharding: Sharding, full: list[Tensor], config: TransformerConfig, *, size: int, rank: int) -> Tensor:
    """Return this rank's shard of full Hugging Face tensors."""
    if sharding is Sharding.QKV:
        groups, head = config.num_query_groups, config.kv_channels
        fused = torch.cat([part.view(groups, -1, part.shape[-1]) for part in full], dim=1)
        assert fused.shape[1] == (config.num_attention_heads // groups + 2) * head, "q, k, v do not fit the config"
        return fused.chunk(size, dim=0)[rank].flatten(0, 1)
    if sharding is Sharding.GATE_UP:
        return torch.cat([part.chunk(size, dim=0)[rank] for part in full])
    if sharding in (Sharding.MAMBA_IN, Sharding.MAMBA_CONV):
        return torch.cat([part.chunk(size, dim=0)[rank] for part in _cut(full[0], _mamba_parts(sharding, config))])
    if sharding is Sharding.ROWS:
        return full[0].chunk(size, dim=0)[rank]
    if sharding is Sharding.COLUMNS:
        return full[0].chunk(size, dim=1)[rank]
    return full[0]


def _join(sharding: Sharding, shards: list[Tensor], config: TransformerConfig) -> list[Tensor]:
    """Return full Hugging Face tensors from the shards of all ranks; the inverse of `_split`."""
    if sharding is Sharding.QKV:
        groups, head = config.num_query_groups, config.kv_channels
        joined = torch.cat(shards)
        fused = joined.view(groups, -1, joined.shape[-1])
        sizes = [config.num_attention_heads // groups * head, head, head]
        return [part.flatten(0, 1) for part in torch.split(fused, sizes, dim=1)]
    if sharding is Sharding.GATE_UP:
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]
    if sharding in (Sharding.MAMBA_IN, Sharding.MAMBA_CONV):
        sizes = [size // len(shards) for size in _mamba_parts(sharding, config)]
        parts = zip(*[_cut(shard, sizes) for shard in shards], strict=True)
        return [torch.cat([torch.cat(part) for part in parts])]
    if sharding is Sharding.ROWS:
        return [torch.cat(shards)]
    if sharding is Sharding.COLUMNS:
        return [torch.cat(shards, dim=1)]
    return [shards[0]]


def _cut(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(torch.split(tensor, sizes))  # type: ignore[no-untyped-call]


def _mamba_parts(sharding: Sharding, config: TransformerConfig) -> list[int]:
    """Return the rows of each part of a Mamba mixer's input projection or convolution."""
    inner, state = config.mamba_num_heads * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim
    convolved = [inner, state, state]
    return convolved if sharding is Sharding.MAMBA_CONV else [inner, *convolved, config.mamba_num_heads]


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards
