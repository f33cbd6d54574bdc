"""Activations of one policy worker, in bytes: what the layers keep for the backward pass, and what that pass adds.

Counted from what the code of recipes/policy keeps, on CUDA and on a CPU. One kind of layer differs: the kernels of
`mamba_ssm` compute most of a Mamba-2 layer again in the backward pass, which their stand-in on a CPU does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipes.config.tree import MegatronConfig
from tools.sizing.architecture import Architecture

_MAMBA_CHUNK = 128  # tokens; training keeps one state per chunk of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """One layer's activations in bytes."""

    kept: float  # from its forward to its backward pass; its own input and the output of its norm included
    working: float  # gradients that its backward pass holds at once


def activations(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> LayerActivations:
    """Return what all layers of a pipeline stage keep for `tokens` tokens per GPU, and what the worst of them adds.

    With recomputation a layer keeps its input, and the backward pass holds all activations of one layer.
    """
    stage, stream = megatron.pipeline_model_parallel_size, _stream(model, megatron, tokens, width)
    own, counts = layer_activations(model, megatron, tokens, width), _counts(model)
    if model.has_pairs:
        (other,) = [kind for kind, count in counts.items() if count and kind != "attention"]
        both = (own["attention"], own[other])
        own = {"pair": LayerActivations(kept=sum(x.kept for x in both), working=max(x.working for x in both))}
        counts = {"pair": model.attention_layers}
    built = [(own[kind], count) for kind, count in counts.items() if count]
    if megatron.activation_checkpointing:
        return LayerActivations(
            kept=sum(counts.values()) / stage * stream, working=max(layer.kept + layer.working for layer, _ in built)
        )
    return LayerActivations(
        kept=sum(layer.kept * count for layer, count in built) / stage, working=max(layer.working for layer, _ in built)
    )


def layer_activations(
    model: Architecture, megatron: MegatronConfig, tokens: float, width: int
) -> Mapping[str, LayerActivations]:
    """Return the activations of one layer of each kind on one GPU."""
    tensor, stream = megatron.tensor_model_parallel_size, _stream(model, megatron, tokens, width)
    of_parts = {
        "attention": _attention(model, tokens, width, tensor, has_fused_rotation=megatron.apply_rope_fusion),
        "mamba": _mamba(model, tokens, width, tensor),
        "mlp": _mlp(model, tokens * model.mlp_size * width / tensor),
        "moe": _moe(model, megatron, tokens, width),
    }
    return {
        kind: LayerActivations(kept=2 * stream + kept, working=working) for kind, (kept, working) in of_parts.items()
    }


def _stream(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> float:
    """Return the bytes of the state between two layers."""
    return tokens * model.hidden * width / (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)


def _counts(model: Architecture) -> dict[str, int]:
    return {
        "attention": model.attention_layers,
        "mamba": model.mamba_layers,
        "mlp": model.mlp_layers,
        "moe": model.moe_layers,
    }


def _attention(
    model: Architecture, tokens: float, width: int, tensor: int, *, has_fused_rotation: bool
) -> tuple[float, float]:
    """Return what is kept: queries, keys, values and the output twice; before their norms; sines, sums of scores."""
    queries, all_heads = model.query_heads, model.query_heads + 2 * model.kv_heads
    heads = 2 * queries + all_heads + (all_heads if model.norms_heads else 0)
    rotation = model.head_size * width if model.rotates_heads and not has_fused_rotation else 0
    kept = tokens * (heads * model.head_size * width / tensor + rotation + 4 * queries / tensor)
    return kept, tokens * (queries + all_heads) * model.head_size * width / tensor


def _mamba(model: Architecture, tokens: float, width: int, tensor: int) -> tuple[float, float]:
    """Return what the kernels keep; the backward pass needs as much again."""
    mixed = model.mamba_inner + 2 * model.mamba_groups * model.mamba_state
    states = tokens / _MAMBA_CHUNK * model.mamba_inner * model.mamba_state * 4
    kept = (tokens * (2 * mixed + 3 * model.mamba_inner) * width + states) / tensor
    return kept, kept


def _mlp(model: Architecture, inner: float) -> tuple[float, float]:
    """Return what an MLP keeps of `inner` bytes per matrix, and the gradients of them that are there at once.

    With a gate: both parts of the first product, and what they become. Without one: the activation before and after
    its square.
    """
    return (3 if model.is_gated else 2) * inner, 3 * inner


def _gathered(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> float:
    """Return the bytes of the tokens of all ranks that share the experts, where each rank gathers them.

    In the backward pass these are gradients of outputs, in float32 as they are added up, and of inputs.
    """
    if megatron.moe_token_dispatcher_type != "allgather":
        return 0.0
    ranks = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return tokens / megatron.tensor_model_parallel_size * ranks * model.expert_hidden * (4 + 2 * width)


def _moe(model: Architecture, megatron: MegatronConfig, tokens: float, width: int) -> tuple[float, float]:
    """Return the activations of experts, shared expert and router.

    Tokens are split over the tensor ranks before routing; with even routing each rank receives as many as it sends.
    """
    tensor = megatron.tensor_model_parallel_size
    routed = tokens / tensor * model.experts_per_token
    inner = routed * model.expert_size * width
    kept, _ = _mlp(model, inner)
    working = (3 if model.is_gated else 2) * inner
    kept += routed * (model.expert_hidden + model.expert_size) * width  # input, and the product with the router's share
    shared_kept, shared_working = _mlp(model, tokens * model.shared_size * width / tensor)
    latent = tokens / tensor * model.expert_hidden * width if model.expert_hidden != model.hidden else 0.0
    scores = 3 * tokens / tensor * model.experts * 4
    working += _gathered(model, megatron, tokens, width)
    working += 2 * routed * model.expert_hidden * width  # the gradients of inputs and outputs, each in its two orders
    both = working + shared_working if megatron.moe_shared_expert_overlap else max(working, shared_working)
    return kept + shared_kept + latent + scores, both
