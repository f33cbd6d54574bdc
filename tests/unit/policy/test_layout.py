"""A layout that the ranks or the model cannot be divided by is refused with every reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.config.load import load_config, require_valid
from recipes.config.tree import Config
from recipes.errors import ConfigError
from recipes.policy.layout import check_layout, check_model_fits

BASE = Path(__file__).resolve().parents[3] / "configs" / "grpo_base.yaml"
DENSE = {"num_layers": 4, "num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 64}
HYBRID = DENSE | {"num_moe_experts": 6, "moe_ffn_hidden_size": 32, "mamba_num_heads": 8, "mamba_num_groups": 2}

SHARING = HYBRID | {"moe_shared_expert_intermediate_size": 32}


@pytest.fixture(scope="module")
def config() -> Config:
    return require_valid(load_config(BASE, ["policy.model_name=model"]))


def _refusals(config: Config, sizes: dict[str, Any], vocab_size: int = 96, **layout: Any) -> list[str]:
    defaults = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "expert_model_parallel_size": 1}
    megatron = replace(config.policy.megatron_cfg, **(defaults | layout))
    try:
        check_model_fits(sizes, vocab_size, megatron)
    except ConfigError as error:
        return [f"{problem.where.rpartition('.')[2]}: {problem.expected}" for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        (DENSE, {"tensor_model_parallel_size": 4}),  # two ranks share a key-value head
        (DENSE, {"pipeline_model_parallel_size": 4}),
        (DENSE, {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2}),
        (DENSE, {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}),
        (DENSE, {"context_parallel_size": 3}),
        (HYBRID, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 3}),
        (SHARING, {"moe_shared_expert_overlap": True}),
        (HYBRID, {"use_fused_weighted_squared_relu": True}),
        (HYBRID | {"moe_router_topk": 22}, {"moe_enable_deepep": True}),
        (HYBRID, {"context_parallel_size": 4}),  # two ranks share a Mamba group
    ],
)
def test_a_layout_that_fits_the_model_passes(config: Config, sizes: dict[str, Any], layout: dict[str, Any]) -> None:
    assert _refusals(config, sizes, **layout) == []


@pytest.mark.parametrize(
    ("sizes", "layout", "refusal"),
    [
        (DENSE, {"tensor_model_parallel_size": 3}, "8 attention heads, of 64 units of an MLP, of 2 key-value heads"),
        (HYBRID, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, "a divisor of 2 Mamba groups"),
        (DENSE, {"expert_model_parallel_size": 2}, "1: the model has no experts"),
        (DENSE, {"use_fused_weighted_squared_relu": True}, "false: the model has no experts"),
        (HYBRID | {"gated_linear_unit": True}, {"use_fused_weighted_squared_relu": True}, "the model have a gate"),
        (DENSE, {"moe_shared_expert_overlap": True}, "false: the model has no shared expert"),
        (HYBRID, {"moe_shared_expert_overlap": True}, "false: the model has no shared expert"),
        (SHARING | {"moe_latent_size": 8}, {"moe_shared_expert_overlap": True}, "false: the experts of the model are"),
        (
            HYBRID | {"moe_router_topk": 22},
            {"moe_enable_deepep": True, "expert_tensor_parallel_size": 2},
            "false: a token goes to 22 experts * 2 ranks, and DeepEP's kernels take 32",
        ),
        (HYBRID, {"expert_model_parallel_size": 4}, "a divisor of 6 experts"),
        (DENSE, {"expert_tensor_parallel_size": 2}, "1: the model has no experts"),
        (HYBRID, {"expert_tensor_parallel_size": 3}, "a divisor of 32 units of an expert"),
        (HYBRID, {"tensor_model_parallel_size": 2}, "sequence_parallel: true"),
        (DENSE, {"pipeline_model_parallel_size": 3}, "share the model's 4 layers evenly"),
        (
            DENSE,
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 4},
            "share the model's 4 layers evenly",
        ),
        (HYBRID, {"context_parallel_size": 3}, "8 Mamba heads and 2 Mamba groups"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    config: Config, sizes: dict[str, Any], layout: dict[str, Any], refusal: str
) -> None:
    (found,) = _refusals(config, sizes, **layout)
    assert refusal in found


@pytest.mark.parametrize(
    ("sizes", "layout", "peft", "refusal"),
    [
        (DENSE, {}, {}, None),
        (HYBRID, {}, {}, None),  # routed experts are excluded
        (HYBRID, {"moe_grouped_gemm": False}, {"exclude_modules": ()}, None),
        (HYBRID, {"moe_grouped_gemm": True}, {"exclude_modules": ()}, "also mlp.experts.*"),
        (
            HYBRID,
            {"moe_grouped_gemm": False, "expert_tensor_parallel_size": 2},
            {"exclude_modules": ()},
            "also mlp.exp",
        ),
        (HYBRID, {"moe_grouped_gemm": True}, {"exclude_modules": (), "target_modules": ("linear_qkv",)}, None),
        (DENSE, {}, {"target_modules": ("in_proj", "out_proj")}, "leave one of self_attention.linear_qkv"),
        (DENSE, {}, {"exclude_modules": ("*",)}, "leave one of self_attention.linear_qkv"),
    ],
)
def test_adapters_that_no_layer_can_have_are_refused(
    config: Config, sizes: dict[str, Any], layout: dict[str, Any], peft: dict[str, Any], refusal: str | None
) -> None:
    enabled = replace(config.policy.megatron_cfg.peft, **{"enabled": True, **peft})
    found = _refusals(config, sizes, peft=enabled, **layout)
    assert [one.partition(": ")[0] for one in found] == ([] if refusal is None else ["exclude_modules"])
    assert all(refusal is not None and refusal in one for one in found)
    assert _refusals(config, sizes, peft=replace(enabled, enabled=False), **layout) == []


def test_rows_of_the_vocabulary_are_divided_too(config: Config) -> None:
    found = _refusals(config, DENSE, vocab_size=97, tensor_model_parallel_size=2)
    assert found == ["tensor_model_parallel_size: a divisor of 97 rows of the vocabulary"]


@pytest.mark.parametrize(
    ("world_size", "layout", "refusal"),
    [
        (
            6,
            {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
            "= 4, expected a divisor of 6",
        ),
        (4, {"expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, "a divisor of 2, the policy ranks"),
    ],
)
def test_ranks_that_the_layout_does_not_divide_are_refused(
    config: Config, world_size: int, layout: dict[str, Any], refusal: str
) -> None:
    megatron = replace(config.policy.megatron_cfg, **({"tensor_model_parallel_size": 1} | layout))
    with pytest.raises(ConfigError, match=refusal):
        check_layout(replace(config.policy, megatron_cfg=megatron), world_size=world_size)
