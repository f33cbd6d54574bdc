"""Low-rank adapters (LoRA): the model stays as it is, and linear layers add scale * B (A x) to their output.

Source: https://arxiv.org/abs/2106.09685. A [r, inputs] begins as Kaiming's uniform values, B [outputs, r] as zero, so
training begins with the model itself; scale is alpha / r.

An adapter is cut as its layer is. Where tensor parallelism divides the outputs, A is whole on every rank and B has the
rank's outputs; where it divides the inputs, A has the rank's inputs and B is whole. What travels between ranks is A x,
of r numbers a token. Engines, exports and evaluations get the weight with what its adapter adds to it; checkpoints hold
the adapters alone, under names that no layout changes.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from recipes.config.keys.derive import is_adapted
from recipes.policy.families.mapping import ADAPTERS, Sharding, WeightMapping, mamba_parts, split, tensor_group

if TYPE_CHECKING:
    from recipes.config.tree import PeftConfig


_PLACE = re.compile(r"(?<=\.experts\.)local_experts\.\d+\.")  # which of its layer's experts one is


class Adapter(nn.Module):
    """What is added to one linear layer of this rank."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, base: WeightMapping, cfg: PeftConfig) -> None:
        super().__init__()
        weight, self.base, self.scale = base.param, base, cfg.alpha / cfg.dim
        self.divides_inputs = base.sharding is Sharding.COLUMNS
        self.lora_A = nn.Parameter(weight.new_empty(cfg.dim, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_empty(weight.shape[0], cfg.dim))
        parts = ((self.lora_A, self.divides_inputs, 1), (self.lora_B, not self.divides_inputs, 0))
        for param, is_divided, axis in parts:
            param.allreduce = not layer.is_expert  # type: ignore[attr-defined]  # of experts: over their own replicas
            # What is not divided counts in the gradient's norm on the first tensor rank alone; experts differ by rank.
            set_tensor_model_parallel_attributes(param, is_divided or layer.is_expert, axis, 1)

    def added(self, layer: Any, x: Tensor) -> Tensor:
        """Return what the layer's output [..., outputs] gets for its input `x` [..., inputs]."""
        low, lora_B = (self._by_inputs if self.divides_inputs else self._by_outputs)(layer, x)
        return functional.linear(low * self.scale, lora_B)

    def _by_outputs(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return A x and B where the ranks share the outputs: the gradient of A x is a sum over them."""
        group, lora_A = layer.tp_group, self.lora_A
        if group.size() == 1:
            return functional.linear(x, lora_A), self.lora_B
        if not (layer.explicit_expert_comm or layer.sequence_parallel):
            return copy_to_tensor_model_parallel_region(functional.linear(x, lora_A), group=group), self.lora_B
        low = functional.linear(x, copy_to_tensor_model_parallel_region(lora_A, group=group))
        if not layer.explicit_expert_comm:  # else another layer has brought the tokens, and adds their gradients up
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=group)
        return low, self.lora_B

    def _by_inputs(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return A x and B where the ranks share the inputs: A x is a sum over them."""
        group, low, lora_B = layer.tp_group, functional.linear(x, self.lora_A), self.lora_B
        if group.size() > 1 and layer.explicit_expert_comm:  # another layer adds the outputs up
            lora_B = copy_to_tensor_model_parallel_region(lora_B, group=group)
        elif group.size() > 1 and layer.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=group)
            lora_B = copy_to_tensor_model_parallel_region(lora_B, group=group)
        elif group.size() > 1:
            low = reduce_from_tensor_model_parallel_region(low, group=group)
        return low, lora_B

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return this rank's part of the weight with what the adapter adds, summed in float32."""
        weight = self.base.param.detach()
        return torch.addmm(weight.float(), self.lora_B.float(), self.lora_A.float(), alpha=self.scale).to(weight.dtype)

    @torch.no_grad()
    def begin(self, config: Any) -> None:
        """Set A to what every layout begins with: its layer's name is the seed."""
        group = tensor_group(is_expert=self.base.is_expert)
        rank, inputs = self.lora_A.shape
        inputs *= group.size() if self.divides_inputs else 1
        generator = torch.Generator().manual_seed(zlib.crc32(self.base.names[0].encode()))
        bound = 1 / math.sqrt(inputs)  # Kaiming's, with the slope sqrt(5) that torch gives linear layers
        full = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
        sharding = Sharding.COLUMNS if self.divides_inputs else Sharding.REPLICATED
        self.lora_A.copy_(split(sharding, [full], config, size=group.size(), rank=group.rank()))
        self.lora_B.zero_()

    def mappings(self) -> list[WeightMapping]:
        """Return A and B as full tensors by the names of the package peft; fused weights share one A."""
        of_A = Sharding.COLUMNS if self.divides_inputs else Sharding.REPLICATED
        of_B = Sharding.REPLICATED if self.divides_inputs else self.base.sharding
        names_A, names_B = ([peft_name(name, part) for name in self.base.names] for part in ("lora_A", "lora_B"))
        return [
            *(replace(self.base, param=self.lora_A, sharding=of_A, names=(name,)) for name in names_A),
            replace(self.base, param=self.lora_B, sharding=of_B, names=tuple(names_B)),
        ]


def peft_name(weight: str, part: str) -> str:
    """Return the name of a part of the adapter of a Hugging Face weight."""
    return f"base_model.model.{weight.removesuffix('.weight')}.{part}.weight"


class Adapters(nn.Module):
    """All adapters of this rank's part of the model, which holds them as its child `ADAPTERS`."""

    def __init__(self, adapters: Sequence[Adapter], config: Any) -> None:
        super().__init__()
        self.each = nn.ModuleList(adapters)
        self._config = config

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the adapters to a distributed checkpoint, by the names of their Hugging Face weights."""
        del sharded_offsets, metadata
        state = {}
        for number, adapter in enumerate(self.each):
            assert isinstance(adapter, Adapter)
            of_A, *_, of_B = adapter.mappings()
            state[f"{prefix}each.{number}.lora_A"] = _sharded(of_A, self._config)
            state[f"{prefix}each.{number}.lora_B"] = _sharded(of_B, self._config)
        return state


def _sharded(mapping: WeightMapping, config: Any) -> ShardedTensor | ShardedTensorFactory:
    """Describe A or B to a distributed checkpoint; what is fused in it is stored in parts, as each has its own cut."""
    group, sharding, key = tensor_group(is_expert=mapping.is_expert), mapping.sharding, mapping.names[0]
    is_whole, axis = sharding is Sharding.REPLICATED, int(sharding is Sharding.COLUMNS)
    offsets = [] if is_whole else [(axis, group.rank(), group.size())]
    replica = (
        parallel_state.get_expert_data_parallel_rank()
        if mapping.is_expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    )
    copy = (0, group.rank() if is_whole else 0, replica)
    if sharding not in (Sharding.GATE_UP, Sharding.MAMBA_IN):
        return ShardedTensor.from_rank_offsets(key, mapping.param, *offsets, replica_id=copy)
    rows = mapping.param.shape[0]
    sizes = (
        [rows // 2] * 2
        if sharding is Sharding.GATE_UP
        else [part // group.size() for part in mamba_parts(sharding, config)]
    )

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        del flattened_range
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{number}", part, *offsets, replica_id=replica_id)
            for number, part in enumerate(torch.split(tensor, sizes))
        ]

    return ShardedTensorFactory(key, mapping.param, build, torch.cat, copy)


def add_adapters(model: Any, mappings: Sequence[WeightMapping], cfg: PeftConfig) -> None:
    """Freeze `model` and give its chosen linear layers adapters, of undefined values until `begin_adapters`."""
    model.requires_grad_(False)
    by_weight = {id(mapping.param): mapping for mapping in mappings}
    adapters = []
    for name, layer in model.named_modules():
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            continue
        mapping = by_weight.get(id(layer.weight))
        within = _PLACE.sub("", name.removeprefix("decoder.layers.").partition(".")[2])
        if mapping is None or not is_adapted(within, cfg):
            continue
        adapters.append(Adapter(layer, mapping, cfg))
        layer.register_forward_hook(_add(adapters[-1]))
    model.add_module(ADAPTERS, Adapters(adapters, model.config))
    if (embedding := getattr(model, "embedding", None)) is not None:
        # A layer that is recomputed has a backward pass only if its input has a gradient.
        embedding.register_forward_hook(lambda _, inputs, output: output.requires_grad_(torch.is_grad_enabled()))


def _add(adapter: Adapter) -> Any:
    def hook(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return output[0] + adapter.added(layer, inputs[0]), output[1]

    return hook


def adapters_of(model: Any) -> list[Adapter]:
    """Return the adapters of this rank's part of a model; none where it is trained whole."""
    found = getattr(model, ADAPTERS, None)
    return [] if found is None else list(found.each)


def with_adapters(mappings: Sequence[WeightMapping], model: Any) -> list[WeightMapping]:
    """Return the weights of the model, each with its adapter where it has one: they are read with what it adds."""
    merged = {id(adapter.base.param): adapter.merged for adapter in adapters_of(model)}
    return [replace(mapping, merged=merged.get(id(mapping.param))) for mapping in mappings]


def begin_adapters(model: Any) -> list[WeightMapping]:
    """Set the adapters to their start values; return what they are as full tensors."""
    for adapter in adapters_of(model):
        adapter.begin(model.config)
    return [mapping for adapter in adapters_of(model) for mapping in adapter.mappings()]


def write_peft(tensors: Mapping[str, Tensor], cfg: PeftConfig, model: str, target: Path) -> None:
    """Write a directory `adapter` in `target` that the package peft reads: `tensors` by the names of its adapters."""
    from safetensors.torch import save_file

    modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})  # whatever is before them
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": cfg.dim,
        "lora_alpha": cfg.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }
    directory = target / "adapter"
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(directory / "adapter_model.safetensors"))
    (directory / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
