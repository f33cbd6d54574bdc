"""Every parallel layout of every family, over real gloo groups, computes what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_ranks import LayoutCase, LayoutOutcome, outcomes
from policy_case import GRADIENT_SCALE, reference_logprobs, save_experts, save_hybrid, save_model
from random_batch import random_batch
from safetensors.torch import load_file
from speed import patiently
from torch import Tensor

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

_TENSOR = {"megatron_cfg__tensor_model_parallel_size": 2, "megatron_cfg__sequence_parallel": "true"}
_EXPERT = {"megatron_cfg__expert_model_parallel_size": 2}
_CONTEXT = {"megatron_cfg__context_parallel_size": 2}
_PIPELINE = {"megatron_cfg__pipeline_model_parallel_size": 2}
_RECOMPUTE = {"megatron_cfg__activation_checkpointing": "true", "logprob_chunk_size": 24}
_Layouts = dict[str, tuple[int, dict[str, Any]]]
_ONE: _Layouts = {"one": (1, {})}
_DENSE: _Layouts = {"context": (2, _CONTEXT), "pipeline": (2, _PIPELINE)}
_EXPERTS: _Layouts = {"tensor": (2, _TENSOR), "expert": (2, _EXPERT)}
_HYBRID: _Layouts = {
    "tensor": (2, _TENSOR | _RECOMPUTE),
    "expert": (2, _EXPERT),
    "tensor-expert": (2, _TENSOR | _EXPERT),
    "context": (2, _CONTEXT),
    "context-expert": (2, _CONTEXT | _EXPERT),
    "pipeline": (2, _PIPELINE | _RECOMPUTE),
    "data": (2, {}),
    "frozen": (1, {"megatron_cfg__freeze_moe_router": "true"}),
}
_FOUR: _Layouts = {
    "tensor-data": (4, _TENSOR),
    "tensor-pipeline": (4, _TENSOR | _PIPELINE),
    "tensor-context": (4, _TENSOR | _CONTEXT | _RECOMPUTE),
    "expert-data": (4, _EXPERT),
    "expert-tensor-data": (4, _EXPERT | _TENSOR),
    "expert-context-data": (4, _EXPERT | _CONTEXT),
    "expert-pipeline": (4, _EXPERT | _PIPELINE),
    "expert-of-four": (4, {"megatron_cfg__expert_model_parallel_size": 4} | _TENSOR),
}


def test_dense_layouts_equal_one_rank(tmp_path: Path) -> None:
    _check(save_model(tmp_path / "model", tied=True), tmp_path, _DENSE)


def test_hybrid_layouts_equal_one_rank(tmp_path: Path) -> None:
    _check(save_hybrid(tmp_path / "model"), tmp_path, _HYBRID)


def test_layouts_of_softmax_routed_experts_equal_one_rank(tmp_path: Path) -> None:
    _check(save_experts(tmp_path / "model"), tmp_path, _EXPERTS)


def test_checkpoints_continue_with_experts_divided_otherwise(tmp_path: Path) -> None:
    model = save_hybrid(tmp_path / "model")
    any_layout = {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"}
    cases = (
        LayoutCase(name="expert", model=model, num_ranks=2, overrides=_EXPERT | any_layout, saves=True),
        LayoutCase(name="to-one", model=model, num_ranks=1, overrides=any_layout, resumes="expert"),
        LayoutCase(name="to-tensor", model=model, num_ranks=2, overrides=_TENSOR | any_layout, resumes="expert"),
        LayoutCase(name="to-stages", model=model, num_ranks=2, overrides=_PIPELINE | any_layout, resumes="expert"),
    )
    found = outcomes(cases, tmp_path, timeout_s=patiently(120))
    saved = found.pop("expert")
    for outcome in found.values():
        assert all(torch.equal(outcome.before[name], tensor) for name, tensor in saved.before.items())
        assert outcome.metrics == pytest.approx(saved.metrics, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_hybrid_layouts_of_four_ranks_equal_one_rank(tmp_path: Path) -> None:
    _check(save_hybrid(tmp_path / "model"), tmp_path, _FOUR)


@pytest.mark.slow
def test_uneven_stages_and_unnormalized_routing_equal_one_rank(tmp_path: Path) -> None:
    model = save_experts(tmp_path / "model", num_hidden_layers=3, norm_topk_prob=False, tie_word_embeddings=True)
    first = _PIPELINE | {"megatron_cfg__num_layers_in_first_pipeline_stage": 1}
    _check(model, tmp_path, {"first": (2, first), "expert-pipeline": (4, first | _EXPERT)})


def _check(model: Path, directory: Path, layouts: _Layouts) -> None:
    """Compare log-probabilities, loss, gradient norm, gradients and exported weights of each layout with one rank's."""
    cases = tuple(
        LayoutCase(name=name, model=model, num_ranks=num_ranks, overrides=overrides)
        for name, (num_ranks, overrides) in (_ONE | layouts).items()
    )
    found = outcomes(cases, directory, timeout_s=patiently(120))
    one = found.pop("one")
    if frozen := found.pop("frozen", None):
        _check_frozen_routers(frozen)
    assert torch.allclose(one.logprobs_BS, reference_logprobs(model, random_batch(10)), atol=2e-5, rtol=0)
    on_disk = load_file(model / "model.safetensors")
    differences = {
        name: problems for name, outcome in found.items() if (problems := _differences(outcome, one, on_disk))
    }
    assert not differences


def _check_frozen_routers(outcome: LayoutOutcome) -> None:
    """Weights of routers stay, their biases move by the update rate, up for experts with few tokens, else down."""
    moved = {name: gradient for name, gradient in outcome.gradients.items() if ".gate." in name}
    weights = [gradient for name, gradient in moved.items() if name.endswith("gate.weight")]
    biases = [gradient * GRADIENT_SCALE for name, gradient in moved.items() if name.endswith("bias")]
    assert weights and not any(gradient.any() for gradient in weights)
    assert biases and all(torch.allclose(bias.abs(), torch.tensor(1e-3), rtol=1e-3) for bias in biases)


def _differences(outcome: LayoutOutcome, one: LayoutOutcome, on_disk: dict[str, Tensor]) -> list[str]:
    result = []
    if outcome.before.keys() != on_disk.keys():
        result.append(f"exported names: {sorted(outcome.before.keys() ^ on_disk.keys())[:4]}")
    result += [
        f"{name} is not exported as it was loaded"
        for name, got in outcome.before.items()
        if not torch.equal(got, on_disk[name])
    ]
    yielded = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in outcome.before.items()]
    if outcome.shapes != yielded:
        result.append("the announced shapes are not those of the export")
    error = (outcome.logprobs_BS - one.logprobs_BS).abs().max().item()
    if not error < 1e-5:
        result.append(f"log-probabilities differ by {error:.1e}")
    if not outcome.leak < 1e-6:
        result.append(f"a sequence moves the log-probabilities of others by {outcome.leak:.1e}")
    loads = [name for name in one.metrics if name.startswith("expert_load/")]
    for name in ("loss", "grad_norm", *loads):
        if outcome.metrics[name] != pytest.approx(one.metrics[name], rel=1e-5):
            result.append(f"{name}: {outcome.metrics[name]}, on one rank {one.metrics[name]}")
    for name, expected in one.gradients.items():
        error = ((outcome.gradients[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()
        if not error < 1e-5:
            result.append(f"gradient of {name} differs by {error:.1e} of its largest entry")
    return result
