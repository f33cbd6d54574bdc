"""Packages that some keys and models need where the policy runs.

The doctor looks for them before a launch on this machine. Elsewhere only the policy's own ranks can.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from recipes.errors import Problem

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig

_MEGATRON = "policy.megatron_cfg."
_FUSED = "transformer_engine"
_MAMBA = ("mamba_ssm", "causal_conv1d")


def package_problems(megatron: MegatronConfig, sizes: Mapping[str, Any], *, has_cuda: bool) -> list[Problem]:
    """Return every key, and kind of layer, that needs a package which is not installed here.

    Args:
        sizes: the arguments of Megatron's `TransformerConfig` that describe the model.
        has_cuda: without CUDA, plain torch takes the place of what Mamba layers need.
    """
    wanted = {
        f"{_MEGATRON}apply_rope_fusion": megatron.apply_rope_fusion,
        f"{_MEGATRON}moe_permute_fusion": megatron.moe_permute_fusion,
        f"{_MEGATRON}optimizer.use_precision_aware_optimizer": megatron.optimizer.use_precision_aware_optimizer,
    }
    missing = [(key, _FUSED, "set it to false, or use the GPU image") for key, value in wanted.items() if value]
    if has_cuda and "mamba_num_heads" in sizes:
        missing += [("policy.model_name (Mamba layers)", name, "use the GPU image") for name in _MAMBA]
        if megatron.context_parallel_size > 1:  # Megatron divides a packed row for Mamba layers by a function of it
            key = f"{_MEGATRON}context_parallel_size (with Mamba layers)"
            missing.append((key, _FUSED, "set it to 1, or use the GPU image"))
    return [
        Problem(where=where, wrong=f"the package {name} is not installed where the policy runs", fix=fix)
        for where, name, fix in missing
        if find_spec(name) is None
    ]
