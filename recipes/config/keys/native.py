"""What the native engine has, as plain data: the launcher and the rules ask without loading torch or a verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Models that the policy builds, as `architectures` of config.json names them.
ARCHITECTURES = (
    *("NemotronHForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
)
_QWEN2: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": False}
_QWEN3 = _QWEN2 | {"attention_bias": False}
# Keys of config.json of which the policy builds one value alone.
BUILT_VALUES: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {
        "layer_norm_epsilon": 1e-5,  # the gated norm of a mixer has it built in
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "use_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "tie_word_embeddings": False,  # transformers does not tie them either
        "norm_topk_prob": True,
    },
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    "MistralForCausalLM": {"hidden_act": "silu", "sliding_window": None},
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3 | {"mlp_only_layers": [], "decoder_sparse_step": 1},
}
_UNSCALED = "default"
EXTERNAL_AGENT = "external_agent"  # at a URL


def unbuilt_values(architecture: str, value_of: Callable[[str, Any], Any]) -> list[tuple[str, str, str]]:
    """Return (key of config.json, what it says, what it must say) of each value that the policy does not build.

    `value_of(key, default)` reads config.json; null there stands for the value that the model has by default. Of rotary
    positions only those without scaling are built; older files have their kind in another block.
    """
    built = BUILT_VALUES[architecture]
    block = next((key for key in ("rope_parameters", "rope_scaling") if value_of(key, None)), "")
    given_rope = value_of(block, {}) if block else {}
    rope = given_rope if isinstance(given_rope, Mapping) else {}
    kind = str(rope.get("rope_type") or rope.get("type") or _UNSCALED)
    scaled = [(f"{block}.rope_type", kind, _UNSCALED)] if kind != _UNSCALED else []
    given = {key: value_of(key, value) for key, value in built.items()}
    return scaled + [
        (key, str(given[key]).lower(), str(value).lower())
        for key, value in built.items()
        if given[key] is not None and given[key] != value
    ]
