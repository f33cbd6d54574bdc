"""Weight gradients that Megatron's linear layers add up inside a kernel of apex, of which a stand-in runs on a CPU."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_reference import add_heads
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_hybrid
from torch import Tensor

from recipes.config.tree import Config
from recipes.policy import step
from tests import grouped_linear

pytestmark = pytest.mark.functional

_KERNELS = "fused_weight_gradient_mlp_cuda"
_BFLOAT16: dict[str, Any] = {"precision": "bfloat16", "megatron_cfg__optimizer__bf16": "true"}
_REDUCTION = "megatron_cfg__distributed_data_parallel_config__"
_RECOMPUTE: dict[str, Any] = {"megatron_cfg__activation_checkpointing": "true"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_heads(save_hybrid(tmp_path_factory.mktemp("heads") / "model"))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The kernel and the address of the sum, for each call of the stand-in."""
    from megatron.core.tensor_parallel import layers

    calls: list[tuple[str, int]] = []
    module = types.ModuleType(_KERNELS)
    module.__spec__ = importlib.machinery.ModuleSpec(_KERNELS, None)
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):

        def add(inputs: Tensor, gradients: Tensor, total: Tensor, name: str = name) -> None:
            calls.append((name, total.data_ptr()))
            total.add_(gradients.t().matmul(inputs))

        setattr(module, name, add)
    monkeypatch.setitem(sys.modules, _KERNELS, module)
    monkeypatch.setattr(layers, _KERNELS, module, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    return calls


def trained(config: Config, *, is_fused: bool) -> tuple[list[dict[str, Any]], dict[str, Tensor], set[int]]:
    """Take two steps; return their metrics, the last gradients by name, and where those of linear layers lie.

    Heads that are recomputed are left out of the last: torch gives their layers copies of the weights.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    megatron = replace(config.policy.megatron_cfg, gradient_accumulation_fusion=is_fused)
    with one_rank(config):
        trainer = trainer_of(replace(config, policy=replace(config.policy, megatron_cfg=megatron)))
        metrics = [step.train_steps(trainer, [shard_of(seed)]) for seed in (0, 1)]
        assert trainer.heads is not None
        parts = {"": trainer.model, "mtp.": trainer.heads}
        params = {f"{prefix}{name}": p for prefix, part in parts.items() for name, p in part.named_parameters()}
        linear = {
            module.weight.main_grad.data_ptr()
            for part in ([trainer.model] if config.policy.megatron_cfg.activation_checkpointing else parts.values())
            for name, module in part.named_modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
            and module.weight.requires_grad
            and not name.endswith("output_layer")  # of which the policy computes no logits
        }
        gradients = {name: p.main_grad.clone() for name, p in params.items() if p.requires_grad}
    return metrics, gradients, linear


@pytest.mark.parametrize(
    ("overrides", "kernel"),
    [
        (_RECOMPUTE | {f"{_REDUCTION}overlap_grad_reduce": "true"}, "wgrad_gemm_accum_fp32"),
        (_BFLOAT16 | {f"{_REDUCTION}grad_reduce_in_fp32": "true"}, "wgrad_gemm_accum_fp32"),
        (_BFLOAT16, "wgrad_gemm_accum_fp16"),
    ],
    ids=["float32", "bfloat16-sums-in-float32", "bfloat16"],
)
@pytest.mark.parametrize("num_heads", [0, 2])
def test_sums_inside_the_kernel_train_as_those_outside(
    model: Path, sums: list[tuple[str, int]], overrides: dict[str, Any], kernel: str, num_heads: int
) -> None:
    options = {"megatron_cfg__mtp_num_layers": num_heads, "megatron_cfg__freeze_moe_router": "true"}
    config = load_case(model, **options, **overrides)
    expected, outside, _ = trained(config, is_fused=False)
    assert sums == []
    metrics, inside, linear = trained(config, is_fused=True)
    assert {name for name, _ in sums} == {kernel}
    assert {place for _, place in sums} == linear
    assert of_policy(metrics) == of_policy(expected)
    for name, gradient in outside.items():
        if name.startswith("mtp."):  # used once per head: outside, these are added up in the precision of the weights
            torch.testing.assert_close(inside[name], gradient, rtol=0.05, atol=0.05 * gradient.abs().max().item())
        else:
            assert torch.equal(inside[name], gradient), name


def test_recomputed_heads_sum_outside_of_the_grouped_kernel_too(
    model: Path, sums: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped_linear.stand_in(monkeypatch.setattr)
    config = load_case(model, megatron_cfg__mtp_num_layers=2, megatron_cfg__moe_grouped_gemm="true", **_RECOMPUTE)
    megatron = replace(config.policy.megatron_cfg, gradient_accumulation_fusion=True)
    with one_rank(config):
        trainer = trainer_of(replace(config, policy=replace(config.policy, megatron_cfg=megatron)))
    assert trainer.heads is not None
    for part, expected in ((trainer.model, True), (trainer.heads, False)):
        grouped = [module for module in part.modules() if isinstance(module, grouped_linear.GroupedLinear)]
        assert grouped and {module.fuse_wgrad_accumulation for module in grouped} == {expected}


def of_policy(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: own[name] for name in own if not name.startswith("mtp/")} for own in metrics]
