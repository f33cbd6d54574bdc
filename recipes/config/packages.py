"""Packages that some keys and models need where the policy runs.

The doctor looks for them before a launch on this machine. Elsewhere only the policy's own ranks can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from recipes.errors import Problem

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig

_MEGATRON = "policy.megatron_cfg."
_FUSED = "transformer_engine"
_ACCUMULATED = "apex (its extension fused_weight_gradient_mlp_cuda)"
_DEEPEP = "deep_ep"
_FLASH = "flash_attn"
_MAMBA = ("mamba_ssm", "causal_conv1d")
_MODULES = {
    _FUSED: "transformer_engine.pytorch",
    _ACCUMULATED: "fused_weight_gradient_mlp_cuda",  # apex can be installed without it
    _DEEPEP: "deep_ep.utils",
    "mamba_ssm": "mamba_ssm.ops.triton.ssd_combined",
}
"""What Megatron imports of a package, where that is not the package itself."""


def package_problems(
    megatron: MegatronConfig, sizes: Mapping[str, Any], *, has_cuda: bool, imports: bool = False
) -> list[Problem]:
    """Return every key, and kind of layer, that needs a package which is not installed here.

    Args:
        sizes: the arguments of Megatron's `TransformerConfig` that describe the model.
        has_cuda: without CUDA, plain torch takes the place of what Mamba layers need.
        imports: also import each package. Megatron takes one that cannot be imported for one that is not installed, and
            does not say why.
    """
    missing = _needed(megatron, sizes, has_cuda=has_cuda)
    wrong = {name: _wrong(name, imports=imports) for _, name, _ in missing}
    if not has_cuda and not wrong.get(_DEEPEP, "none asked for"):
        wrong[_DEEPEP] = f"the package {_DEEPEP} needs CUDA, which is not there where the policy runs"
    return [Problem(where=where, wrong=text, fix=fix) for where, name, fix in missing if (text := wrong[name])]


def image_problems(megatron: MegatronConfig, sizes: Mapping[str, Any], locked: Collection[str]) -> list[Problem]:
    """Return every key, and kind of layer, that needs a package which the GPU image has not.

    Args:
        locked: the names of the packages in the image, in the normalized form of package indexes.
    """
    needed = _needed(megatron, sizes, has_cuda=True)
    wrong = "the package {} is not among those of the GPU image (containers/requirements-gpu.lock)"
    return [
        Problem(where=where, wrong=wrong.format(name), fix=fix)
        for where, name, fix in needed
        if name.partition(" ")[0].replace("_", "-") not in locked
    ]


def _needed(megatron: MegatronConfig, sizes: Mapping[str, Any], *, has_cuda: bool) -> list[tuple[str, str, str]]:
    """Return key, package and what to do without it, of everything that needs a package."""
    optimizer = megatron.optimizer  # an offloaded one has typed state of Megatron's own
    has_fused_adam = optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload
    wanted = {
        f"{_MEGATRON}apply_rope_fusion": megatron.apply_rope_fusion,
        f"{_MEGATRON}moe_permute_fusion": megatron.moe_permute_fusion,
        f"{_MEGATRON}moe_grouped_gemm": megatron.moe_grouped_gemm,
        f"{_MEGATRON}optimizer.use_precision_aware_optimizer": has_fused_adam,
    }
    missing = [(key, _FUSED, "set it to false, or use the GPU image") for key, value in wanted.items() if value]
    if megatron.attention_backend != "local":
        missing.append((f"{_MEGATRON}attention_backend", _FUSED, "set it to local, or use the GPU image"))
    if megatron.attention_backend == "flash":
        fix = "set it to auto or fused, or add the package to the image"
        missing.append((f"{_MEGATRON}attention_backend", _FLASH, fix))
    if megatron.gradient_accumulation_fusion:
        fix = "set it to false, or install apex built with --cpp_ext and --cuda_ext"
        missing.append((f"{_MEGATRON}gradient_accumulation_fusion", _ACCUMULATED, fix))
    if megatron.moe_enable_deepep:
        fix = "set it to false and moe_token_dispatcher_type to alltoall, or add the package to the GPU image"
        missing.append((f"{_MEGATRON}moe_enable_deepep", _DEEPEP, fix))
    if has_cuda and "mamba_num_heads" in sizes:
        missing += [("policy.model_name (Mamba layers)", name, "use the GPU image") for name in _MAMBA]
        if megatron.context_parallel_size > 1:  # Megatron divides a packed row for Mamba layers by a function of it
            key = f"{_MEGATRON}context_parallel_size (with Mamba layers)"
            missing.append((key, _FUSED, "set it to 1, or use the GPU image"))
    return missing


def _wrong(name: str, *, imports: bool) -> str:
    """Return what is wrong with a package where the policy runs, or nothing."""
    module = _MODULES.get(name, name)
    if find_spec(module.partition(".")[0]) is None:
        return f"the package {name} is not installed where the policy runs"
    try:
        if imports:
            import_module(module)
    except Exception as error:  # a wrong version of what it is compiled against raises anything
        return f"the package {name} cannot be imported where the policy runs: {type(error).__name__}: {error}"
    return ""
