"""Hugging Face <-> Megatron weights, one parameter at a time, whatever the model family.

Megatron fuses query, key and value per query group, and gate with up projection; tensor parallelism then splits them.
A family lists its parameters as `WeightMapping`s; `load` fills them from full tensors, and `FullWeights` of `gather.py`
makes full tensors of them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

ADAPTERS = "adapters"  # child of a model that holds its low-rank adapters (recipes/policy/lora.py)
TensorShape = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""

_EXPERT_WEIGHT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<module>\d+)\.)?(?P<linear>linear_fc[12])\.weight(?P<weight>\d*)"
)


class Sharding(StrEnum):
    """How a Megatron parameter is made of its Hugging Face tensors, and what tensor parallelism splits."""

    QKV = "qkv"  # per query group: its query heads, key, value; these rows are split
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
    is_expert: bool = False  # of a routed expert: other ranks hold other experts
    merged: Callable[[], Tensor] | None = None  # returns what engines and exports get where that is not `param`

    def value(self) -> Tensor:
        """Return this rank's part of the weight as engines and exports get it."""
        return self.param.data if self.merged is None else self.merged()


def base_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that the model's checkpoint has, by their names: all but those of adapters."""
    return [(name, param) for name, param in model.named_parameters() if not name.startswith(f"{ADAPTERS}.")]


@torch.no_grad()
def load(mappings: Sequence[WeightMapping], config: TransformerConfig, read: Callable[[str], Tensor]) -> None:
    """Fill every parameter from full tensors that `read` returns by Hugging Face name."""
    for mapping in mappings:
        group = tensor_group(is_expert=mapping.is_expert)
        full = [read(name) for name in mapping.names]
        shard = split(mapping.sharding, full, config, size=group.size(), rank=group.rank())
        mapping.param.copy_(shard.view_as(mapping.param))


def tensor_group(*, is_expert: bool) -> dist.ProcessGroup:
    """Return the ranks that share a parameter by tensor parallelism."""
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()  # type: ignore[no-any-return]
    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[no-any-return]


def first_local_expert(config: TransformerConfig) -> int:
    """Return the number, in the whole layer, of the first expert that this rank holds."""
    num_local = config.num_moe_experts // config.expert_model_parallel_size
    return int(parallel_state.get_expert_model_parallel_rank() * num_local)


def weight_of_expert(name: str, config: TransformerConfig) -> tuple[int, str] | None:
    """Return which expert of the layer a parameter belongs to, and whether it is its linear_fc1 or its linear_fc2.

    `name` is Megatron's within the layer; None where it is of no routed expert. Experts that are computed one after
    another are modules of their own; those of a grouped GEMM are numbered weights of one.
    """
    found = _EXPERT_WEIGHT.fullmatch(name)
    if found is None:
        return None
    local = int(found["module"] or found["weight"])
    return first_local_expert(config) + local, found["linear"]


def sum_experts_apart(model: torch.nn.Module) -> None:
    """Have the gradients of experts summed over the ranks that hold the same experts.

    Megatron does so where experts are divided over ranks. Where only tensor parallelism divides the other layers, it
    takes an expert for a part of them and adds nothing up, without any error.
    """
    for name, param in model.named_parameters():
        if ".experts." in name:
            param.allreduce = False  # type: ignore[attr-defined]


def split(sharding: Sharding, full: list[Tensor], config: TransformerConfig, *, size: int, rank: int) -> Tensor:
    """Return this rank's shard of full Hugging Face tensors."""
    if sharding is Sharding.QKV:
        groups, head = config.num_query_groups, config.kv_channels
        fused = torch.cat([part.view(groups, -1, *part.shape[1:]) for part in full], dim=1)  # weights or biases
        assert fused.shape[1] == (config.num_attention_heads // groups + 2) * head, "q, k, v do not fit the config"
        return fused.flatten(0, 1).chunk(size, dim=0)[rank]  # also where ranks share a group
    if sharding is Sharding.GATE_UP:
        return torch.cat([part.chunk(size, dim=0)[rank] for part in full])
    if sharding in (Sharding.MAMBA_IN, Sharding.MAMBA_CONV):
        return torch.cat([part.chunk(size, dim=0)[rank] for part in _cut(full[0], mamba_parts(sharding, config))])
    if sharding is Sharding.ROWS:
        return full[0].chunk(size, dim=0)[rank]
    if sharding is Sharding.COLUMNS:
        return full[0].chunk(size, dim=1)[rank]
    return full[0]


def join(sharding: Sharding, shards: list[Tensor], config: TransformerConfig) -> list[Tensor]:
    """Return full Hugging Face tensors from the shards of all ranks; the inverse of `split`.

    A tensor that lies in one piece within one shard is a view of it.
    """
    if sharding is Sharding.QKV:
        groups, head = config.num_query_groups, config.kv_channels
        joined = _joined(shards)
        fused = joined.view(groups, -1, *joined.shape[1:])
        sizes = [config.num_attention_heads // groups * head, head, head]
        return [part.flatten(0, 1) for part in torch.split(fused, sizes, dim=1)]
    if sharding is Sharding.GATE_UP:
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [_joined([gate for gate, _ in halves]), _joined([up for _, up in halves])]
    if sharding in (Sharding.MAMBA_IN, Sharding.MAMBA_CONV) and len(shards) > 1:
        sizes = [size // len(shards) for size in mamba_parts(sharding, config)]
        parts = zip(*[_cut(shard, sizes) for shard in shards], strict=True)
        return [torch.cat([torch.cat(part) for part in parts])]
    if sharding is Sharding.ROWS:
        return [_joined(shards)]
    if sharding is Sharding.COLUMNS:
        return [_joined(shards, dim=1)]
    return [shards[0]]


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _cut(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(torch.split(tensor, sizes))  # type: ignore[no-untyped-call]


def mamba_parts(sharding: Sharding, config: TransformerConfig) -> list[int]:
    """Return the rows of each part of a Mamba mixer's input projection or convolution."""
    inner, state = config.mamba_num_heads * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim
    convolved = [inner, state, state]
    return convolved if sharding is Sharding.MAMBA_CONV else [inner, *convolved, config.mamba_num_heads]
