"""Hugging Face <-> Megatron weights of the dense Qwen3 family, one parameter at a time.

Megatron fuses query, key and value per query group, and gate with up projection; tensor parallelism then splits them.
`export` yields full tensors under Hugging Face names on every rank of a data-parallel replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class Layout(StrEnum):
    """How a Megatron parameter relates to its Hugging Face tensors and to tensor parallelism."""

    QKV = "qkv"  # per query group: its query heads, key, value; groups are split
    GATE_UP = "gate_up"  # gate rows, then up rows; each is split
    ROWS = "rows"  # output dimension split
    COLUMNS = "columns"  # input dimension split
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter of this rank and the tensors it is made of."""

    param: torch.nn.Parameter
    layout: Layout
    names: tuple[str, ...]  # Hugging Face names


_LAYER_ENTRIES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "input_layernorm.weight": (Layout.REPLICATED, ("input_layernorm",)),
    "self_attention.linear_qkv.weight": (Layout.QKV, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "self_attention.q_layernorm.weight": (Layout.REPLICATED, ("self_attn.q_norm",)),
    "self_attention.k_layernorm.weight": (Layout.REPLICATED, ("self_attn.k_norm",)),
    "self_attention.linear_proj.weight": (Layout.COLUMNS, ("self_attn.o_proj",)),
    "pre_mlp_layernorm.weight": (Layout.REPLICATED, ("post_attention_layernorm",)),
    "mlp.linear_fc1.weight": (Layout.GATE_UP, ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2.weight": (Layout.COLUMNS, ("mlp.down_proj",)),
}
_OUTER_ENTRIES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": (Layout.ROWS, ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": (Layout.REPLICATED, ("model.norm.weight",)),
    "output_layer.weight": (Layout.ROWS, ("lm_head.weight",)),
}


def unwrap(model: Any) -> Any:
    """Return the model inside DDP and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def entries(model: Any) -> list[Entry]:
    """List this rank's parameters in model order, with their global Hugging Face names."""
    inner = unwrap(model)
    result = []
    for name, param in inner.named_parameters():
        if name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            layer = inner.decoder.layers[int(index)].layer_number - 1  # global and 0-based, also with pipeline stages
            layout, parts = _LAYER_ENTRIES[rest]
            names = tuple(f"model.layers.{layer}.{part}.weight" for part in parts)
        else:
            layout, names = _OUTER_ENTRIES[name]
        result.append(Entry(param=param, layout=layout, names=names))
    return result


@torch.no_grad()
def load(model: Any, read: Callable[[str], Tensor]) -> None:
    """Fill every parameter from full tensors that `read` returns by Hugging Face name."""
    config = unwrap(model).config
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for entry in entries(model):
        full = [read(name) for name in entry.names]
        entry.param.copy_(_split(entry.layout, full, config, size=size, rank=rank))


@torch.no_grad()
def export(model: Any, select: Callable[[torch.nn.Parameter], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor); collective over the tensor-parallel group.

    Args:
        select: what to export of a parameter, its data by default; the tests export gradients.
    """
    config = unwrap(model).config
    group = parallel_state.get_tensor_model_parallel_group()
    for entry in entries(model):
        local = entry.param.data if select is None else select(entry.param)
        shards = [local] if entry.layout is Layout.REPLICATED else _all_gather(local, group)
        yield from zip(entry.names, _join(entry.layout, shards, config), strict=True)


def full_shapes(model: Any) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of what `export` yields, in its order and without communication."""
    config = unwrap(model).config
    size = parallel_state.get_tensor_model_parallel_world_size()
    result = []
    for entry in entries(model):
        shards = [torch.empty(entry.param.shape, dtype=entry.param.dtype, device="meta")] * (
            1 if entry.layout is Layout.REPLICATED else size
        )
        for name, full in zip(entry.names, _join(entry.layout, shards, config), strict=True):
            result.append((name, full.dtype, tuple(full.shape)))
    return result


def _split(layout: Layout, full: list[Tensor], config: Any, *, size: int, rank: int) -> Tensor:
    """Return this rank's shard of full Hugging Face tensors."""
    if layout is Layout.QKV:
        groups, head = config.num_query_groups, config.kv_channels
        fused = torch.cat([part.view(groups, -1, part.shape[-1]) for part in full], dim=1)
        assert fused.shape[1] == (config.num_attention_heads // groups + 2) * head, "q, k, v do not fit the config"
        return fused.chunk(size, dim=0)[rank].flatten(0, 1)
    if layout is Layout.GATE_UP:
        return torch.cat([part.chunk(size, dim=0)[rank] for part in full])
    if layout is Layout.ROWS:
        return full[0].chunk(size, dim=0)[rank]
    if layout is Layout.COLUMNS:
        return full[0].chunk(size, dim=1)[rank]
    return full[0]


def _join(layout: Layout, shards: list[Tensor], config: Any) -> list[Tensor]:
    """Return full Hugging Face tensors from the shards of all ranks; the inverse of `_split`."""
    if layout is Layout.QKV:
        groups, head = config.num_query_groups, config.kv_channels
        joined = torch.cat(shards)
        fused = joined.view(groups, -1, joined.shape[-1])
        sizes = [config.num_attention_heads // groups * head, head, head]
        return [part.flatten(0, 1) for part in torch.split(fused, sizes, dim=1)]
    if layout is Layout.GATE_UP:
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]
    if layout is Layout.ROWS:
        return [torch.cat(shards)]
    if layout is Layout.COLUMNS:
        return [torch.cat(shards, dim=1)]
    return [shards[0]]


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards
