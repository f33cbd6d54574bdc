"""What a family builds in otherwise than a checkpoint says is refused by the name of its key."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from recipes.config.keys.native import unbuilt_values
from recipes.policy.families.nemotron_h import NemotronH
from recipes.policy.families.transformer import Llama, Mistral, Qwen2, Qwen3Moe

HYBRID = {
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
    "tie_word_embeddings": False,
    "num_experts_per_tok": 4,
}


def _hybrid(**values: Any) -> PretrainedConfig:
    config = AutoConfig.for_model("nemotron_h", **HYBRID)
    for name, value in values.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    "values",
    [{}, {"num_nextn_predict_layers": 1}, {"n_group": 4, "topk_group": 2}, {"moe_latent_size": 64}, {"n_groups": 1}],
)
def test_what_the_published_hybrids_say_is_built(values: dict[str, Any]) -> None:
    assert NemotronH().refusals(_hybrid(**values)) == []


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"layer_norm_epsilon": 1e-6}, ("layer_norm_epsilon", "1e-06", "1e-05")),
        ({"use_conv_bias": False}, ("use_conv_bias", "false", "true")),
        ({"mamba_proj_bias": True}, ("mamba_proj_bias", "true", "false")),
        ({"use_bias": True}, ("use_bias", "true", "false")),
        ({"mlp_bias": True}, ("mlp_bias", "true", "false")),
        ({"attention_bias": True}, ("attention_bias", "true", "false")),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings", "true", "false")),
        ({"norm_topk_prob": False}, ("norm_topk_prob", "false", "true")),
        ({"num_experts_per_tok": 1}, ("num_experts_per_tok", "1", "more")),
        ({"num_nextn_predict_layers": 2}, ("num_nextn_predict_layers", "2", "1")),
        (
            {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["moe", "full_attention"]},
            ("mtp_layers_block_type", "e*", "*e"),
        ),
        ({"n_group": 4, "topk_group": 1}, ("num_experts_per_tok / topk_group", "4", "2")),
    ],
)
def test_what_a_hybrid_says_otherwise_is_refused(values: dict[str, Any], refusal: tuple[str, str, str]) -> None:
    assert NemotronH().refusals(_hybrid(**values)) == [refusal]


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"mlp_only_layers": [0]}, ("mlp_only_layers", "[0]", "[]")),
        ({"decoder_sparse_step": 2}, ("decoder_sparse_step", "2", "1")),
        ({"attention_bias": True}, ("attention_bias", "true", "false")),
    ],
)
def test_layers_without_experts_among_others_are_refused(values: dict[str, Any], refusal: tuple[str, str, str]) -> None:
    assert Qwen3Moe().refusals(AutoConfig.for_model("qwen3_moe", **values)) == [refusal]
    assert Qwen3Moe().refusals(AutoConfig.for_model("qwen3_moe")) == []


@pytest.mark.parametrize(
    ("family", "kind", "values", "refusal"),
    [
        (Llama(), "llama", {"attention_bias": True}, ("attention_bias", "true", "false")),
        (Llama(), "llama", {"mlp_bias": True}, ("mlp_bias", "true", "false")),
        (Llama(), "llama", {"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        (Mistral(), "mistral", {"sliding_window": 4096}, ("sliding_window", "4096", "none")),
        (Qwen2(), "qwen2", {"use_sliding_window": True}, ("use_sliding_window", "true", "false")),
        *(
            (
                family,
                kind,
                {"rope_scaling": {"rope_type": rope, "factor": 8.0}},
                ("rope_parameters.rope_type", rope, "default"),
            )
            for family, kind in ((Llama(), "llama"), (Qwen2(), "qwen2"))
            for rope in ("linear", "dynamic")
        ),
    ],
)
def test_what_a_relative_of_llama_says_otherwise_is_refused(
    family: Llama, kind: str, values: dict[str, Any], refusal: tuple[str, str, str]
) -> None:
    usual = {"sliding_window": None} if kind == "mistral" else {}
    assert family.refusals(AutoConfig.for_model(kind, **usual | values)) == [refusal]
    assert family.refusals(AutoConfig.for_model(kind, **usual)) == []


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({}, []),
        ({"rope_scaling": None, "rope_theta": 5e5}, []),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, []),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, [("rope_scaling.rope_type", "linear", "default")]),
        ({"rope_scaling": {"rope_type": "llama3"}}, [("rope_scaling.rope_type", "llama3", "default")]),
        ({"rope_parameters": {"rope_type": "yarn"}}, [("rope_parameters.rope_type", "yarn", "default")]),
    ],
)
def test_scaled_positions_are_refused_as_old_and_new_files_say_them(config: dict[str, Any], refusal: list[Any]) -> None:
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"):
        assert unbuilt_values(architecture, config.get) == refusal
