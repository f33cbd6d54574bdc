"""The experts of a layer as one grouped GEMM of Transformer Engine, where Megatron's plain ones run one after another.

Both have the same weights under other names, and Megatron writes them under the same names into a checkpoint.
"""

from __future__ import annotations

from megatron.core.extensions import transformer_engine
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def choose_experts(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Let a layer of experts, specified with plain ones, compute them as the configuration asks."""
    if not config.moe_grouped_gemm:
        return
    plain = layer.submodules.experts.submodules
    grouped = MLPSubmodules(
        linear_fc1=transformer_engine.TEColumnParallelGroupedLinear,
        linear_fc2=transformer_engine.TERowParallelGroupedLinear,
        activation_func=plain.activation_func,
    )
    layer.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=grouped)
