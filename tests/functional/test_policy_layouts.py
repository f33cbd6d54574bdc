"""Every parallel layout of every family, over real gloo groups, computes what one rank computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

from recipes.routes import ROUTES_CHANGED, ROUTES_UNKNOWN
from tests.groups import LocalStore

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

_TENSOR = {"megatron_cfg__tensor_model_parallel_size": 2, "megatron_cfg__sequence_parallel": "true"}
_WITHOUT_SEQUENCE = {"megatron_cfg__tensor_model_parallel_size": 2}
_REDUCTION = "megatron_cfg__distributed_data_parallel_config__"
_GATHER_AFTER = {f"{_REDUCTION}overlap_param_gather": "false"}
_OVERLAP = {f"{_REDUCTION}overlap_grad_reduce": "true", f"{_REDUCTION}overlap_param_gather": "true"}
_EXPERT = {"megatron_cfg__expert_model_parallel_size": 2}
_GATHER = {"megatron_cfg__moe_token_dispatcher_type": "allgather"}
_GROUPED = {"megatron_cfg__moe_grouped_gemm": "true"}
_OVERLAP_SHARED = {"megatron_cfg__moe_shared_expert_overlap": "true"}
_SHARED_EXPERT = {"megatron_cfg__expert_tensor_parallel_size": 2}
_CONTEXT = {"megatron_cfg__context_parallel_size": 2}
_PIPELINE = {"megatron_cfg__pipeline_model_parallel_size": 2}
_RECOMPUTE = {"megatron_cfg__activation_checkpointing": "true", "logprob_chunk_size": 24}
_BFLOAT16 = {"precision": "bfloat16", "megatron_cfg__optimizer__bf16": "true"}
_Layouts = dict[str, tuple[int, dict[str, Any]]]
_ONE: _Layouts = {"one": (1, {})}
_DENSE: _Layouts = {
    "tensor": (2, _WITHOUT_SEQUENCE),
    "sequence": (2, _TENSOR | _RECOMPUTE),
    "context": (2, _CONTEXT),
    "pipeline": (2, _PIPELINE),
    "data-gather-after": (2, _GATHER_AFTER),
    "data-overlap": (2, _OVERLAP),
    "data-plain": (2, _GATHER_AFTER | {"megatron_cfg__optimizer__use_distributed_optimizer": "false"}),
}
_BIASED: _Layouts = {"tensor": (2, _TENSOR), "pipeline": (2, _PIPELINE)}
_EXPERTS: _Layouts = {
    "tensor": (2, _TENSOR),
    "expert": (2, _EXPERT),
    "shared-expert": (2, _TENSOR | _SHARED_EXPERT),
    "shared-expert-grouped": (2, _TENSOR | _SHARED_EXPERT | _GROUPED),
    "data-overlap": (2, _OVERLAP),
}
_HYBRID: _Layouts = {
    "tensor": (2, _TENSOR | _RECOMPUTE),
    "expert": (2, _EXPERT),
    "expert-gather": (2, _EXPERT | _GATHER),
    "expert-grouped": (2, _EXPERT | _GROUPED | {"megatron_cfg__use_fused_weighted_squared_relu": "true"}),
    "tensor-expert": (2, _TENSOR | _EXPERT),
    "shared-expert": (2, _SHARED_EXPERT),
    "context": (2, _CONTEXT),
    "context-expert": (2, _CONTEXT | _EXPERT),
    "pipeline": (2, _PIPELINE | _RECOMPUTE),
    "data": (2, {}),
    "frozen": (1, {"megatron_cfg__freeze_moe_router": "true"}),
}
_FROM_EXPERTS: _Layouts = {
    "to-one": (1, {}),
    "to-grouped": (2, _TENSOR | _EXPERT | _GROUPED),
    "to-tensor": (2, _TENSOR),
    "to-stages": (2, _PIPELINE),
}
_FOUR: _Layouts = {
    "tensor-data": (4, _TENSOR),
    "tensor-pipeline": (4, _TENSOR | _PIPELINE),
    "tensor-context": (4, _TENSOR | _CONTEXT | _RECOMPUTE),
    "expert-data": (4, _EXPERT),
    "expert-tensor-data": (4, _EXPERT | _TENSOR),
    "expert-context-data": (4, _EXPERT | _CONTEXT),
    "expert-pipeline": (4, _EXPERT | _PIPELINE),
    "expert-shared": (4, _EXPERT | _SHARED_EXPERT | _TENSOR),
    "expert-gather-tensor-data": (4, _EXPERT | _GATHER | _TENSOR),
    "expert-gather-shared": (4, _EXPERT | _GATHER | _SHARED_EXPERT | _TENSOR),
    "expert-grouped-tensor-data": (4, _EXPERT | _GROUPED | _TENSOR | _RECOMPUTE),
    "expert-gather-grouped-shared": (4, _EXPERT | _GATHER | _GROUPED | _SHARED_EXPERT | _TENSOR),
    "expert-of-four": (4, {"megatron_cfg__expert_model_parallel_size": 4} | _TENSOR),
}


_REPLAY = {"router_replay__enabled": "true"}
_REPLAYED: _Layouts = {
    "tensor": (2, _TENSOR | _RECOMPUTE | _REPLAY),
    "expert": (2, _EXPERT | _REPLAY),
    "context": (2, _CONTEXT | _REPLAY),
    "pipeline": (2, _PIPELINE | _RECOMPUTE | _REPLAY),
    "data": (2, _REPLAY),
}
_REPLAYED_BY_FOUR: _Layouts = {
    "tensor-context": (4, _TENSOR | _CONTEXT | _RECOMPUTE | _REPLAY),
    "tensor-pipeline": (4, _TENSOR | _PIPELINE | _REPLAY),
    "expert-context-data": (4, _EXPERT | _CONTEXT | _REPLAY),
    "expert-pipeline": (4, _EXPERT | _PIPELINE | _RECOMPUTE | _REPLAY),
    "expert-gather-tensor-data": (4, _EXPERT | _GATHER | _TENSOR | _REPLAY),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """One model of each family."""

    dense: Path
    biased: Path
    experts: Path
    hybrid: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("models")
    return Models(
        dense=save_model(directory / "dense", tied=True),
        biased=save_model(directory / "biased", family="qwen2"),
        experts=save_experts(directory / "experts"),
        hybrid=save_hybrid(directory / "hybrid"),
    )


@pytest.fixture(scope="module")
def found(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutOutcome]:
    """What every case of two ranks did, all in one job: the ranks import Megatron once."""
    cases = (
        *_cases(models.dense, _DENSE),
        *_cases(models.biased, _BIASED),
        *_cases(models.experts, _EXPERTS),
        *_cases(models.hybrid, _HYBRID),
        *_resumptions(models.hybrid, (2, _EXPERT), _FROM_EXPERTS),
        LayoutCase(name="rounded", model=models.hybrid, num_ranks=1, overrides=_BFLOAT16, trains=False),
    )
    return outcomes(cases, tmp_path_factory.mktemp("job"), timeout_s=patiently(140))


@pytest.mark.parametrize(
    ("family", "layouts"),
    [("dense", _DENSE), ("biased", _BIASED), ("experts", _EXPERTS), ("hybrid", _HYBRID)],
    ids=["dense", "biased", "experts", "hybrid"],
)
def test_layouts_equal_one_rank(
    models: Models, found: dict[str, LayoutOutcome], family: str, layouts: _Layouts
) -> None:
    _check(getattr(models, family), found, layouts)


def test_frozen_routers_stay_and_their_biases_move(found: dict[str, LayoutOutcome]) -> None:
    """By the update rate, up for experts with few tokens, else down."""
    moved = {name: gradient for name, gradient in found["hybrid-frozen"].gradients.items() if ".gate." in name}
    weights = [gradient for name, gradient in moved.items() if name.endswith("gate.weight")]
    biases = [gradient * GRADIENT_SCALE for name, gradient in moved.items() if name.endswith("bias")]
    assert weights and not any(gradient.any() for gradient in weights)
    assert biases and all(torch.allclose(bias.abs(), torch.tensor(1e-3), rtol=1e-3) for bias in biases)


def test_biases_of_routers_stay_in_float32_where_the_model_is_rounded(
    models: Models, found: dict[str, LayoutOutcome]
) -> None:
    on_disk = load_file(models.hybrid / "model.safetensors")
    for name, tensor in found["rounded"].before.items():
        kept = on_disk[name] if name.endswith("e_score_correction_bias") else on_disk[name].bfloat16()
        assert tensor.dtype == kept.dtype and torch.equal(tensor, kept), name


def test_checkpoints_continue_with_experts_divided_otherwise(found: dict[str, LayoutOutcome]) -> None:
    _check_resumptions(found, _FROM_EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "others"),
    [
        ((2, _EXPERT | _GROUPED), {"to-one": (1, {}), "to-grouped": (1, _GROUPED)}),
        ((4, _TENSOR | _PIPELINE), _ONE | {"to-experts": (2, _EXPERT)}),
        (
            (1, {}),
            {
                "to-tensor-stages": (4, _TENSOR | _PIPELINE),
                "to-experts": (2, _EXPERT),
                "to-shared-expert": (2, _TENSOR | _SHARED_EXPERT),
            },
        ),
    ],
    ids=["grouped", "tensor-pipeline", "one"],
)
def test_checkpoints_continue_under_other_layouts(
    models: Models, saved: tuple[int, dict[str, Any]], others: _Layouts, tmp_path: Path
) -> None:
    cases = _resumptions(models.hybrid, saved, others)
    _check_resumptions(outcomes(cases, tmp_path, timeout_s=patiently(140)), others)


@pytest.mark.slow
def test_hybrid_layouts_of_four_ranks_equal_one_rank(models: Models, tmp_path: Path) -> None:
    _check(models.hybrid, outcomes(_cases(models.hybrid, _FOUR), tmp_path, timeout_s=patiently(140)), _FOUR)


@pytest.mark.parametrize("layouts", [_REPLAYED, pytest.param(_REPLAYED_BY_FOUR, marks=pytest.mark.slow)])
def test_layouts_that_replay_any_routes_equal_one_rank(models: Models, layouts: _Layouts, tmp_path: Path) -> None:
    """Each rank finds the routes of its own tokens in its own layers, also where it computes them again."""
    cases = _cases(models.hybrid, {"replaying": (1, _REPLAY)} | layouts)
    plain, *others = cases
    found = outcomes((plain, *(replace(case, replays=True) for case in others)), tmp_path, timeout_s=patiently(140))
    one = found["hybrid-replaying"]
    assert (one.logprobs - found["hybrid-one"].logprobs).abs().max() > 0.1, "the routes are not those of the policy"
    assert one.metrics[ROUTES_CHANGED] > 0.3 and 0 < one.metrics[ROUTES_UNKNOWN] < 0.2
    on_disk = load_file(models.hybrid / "model.safetensors")
    for name in layouts:
        outcome = found[f"hybrid-{name}"]
        assert not _differences(outcome, one, on_disk), name
        for metric in (ROUTES_CHANGED, ROUTES_UNKNOWN):
            assert outcome.metrics[metric] == pytest.approx(one.metrics[metric], rel=1e-9), name


@pytest.mark.slow
def test_a_shared_expert_beside_the_exchange_equals_one_after_it(tmp_path: Path) -> None:
    model = save_hybrid(tmp_path / "hybrid", moe_latent_size=None)
    layouts: _Layouts = {
        "alone": (1, _OVERLAP_SHARED),
        "tensor-expert": (2, _OVERLAP_SHARED | _TENSOR | _EXPERT | _RECOMPUTE),
        "expert-pipeline": (4, _OVERLAP_SHARED | _EXPERT | _PIPELINE),
    }
    _check(model, outcomes(_cases(model, layouts), tmp_path / "job", timeout_s=patiently(140)), layouts)


@pytest.mark.slow
def test_tokens_sent_as_deepep_does_equal_one_rank(models: Models, tmp_path: Path) -> None:
    layouts: _Layouts = {
        "expert": (2, _EXPERT),
        "expert-grouped-tensor-data": (4, _EXPERT | _GROUPED | _TENSOR | _RECOMPUTE),
        "expert-shared": (4, _EXPERT | _SHARED_EXPERT | _TENSOR),
        "expert-pipeline": (4, _EXPERT | _PIPELINE),
    }
    one, *others = _cases(models.hybrid, layouts)
    cases = (one, *(replace(case, is_flex=True) for case in others))
    _check(models.hybrid, outcomes(cases, tmp_path, timeout_s=patiently(140)), layouts)


@pytest.mark.slow
def test_uneven_stages_and_unnormalized_routing_equal_one_rank(tmp_path: Path) -> None:
    model = save_experts(tmp_path / "uneven", num_hidden_layers=3, norm_topk_prob=False, tie_word_embeddings=True)
    first = _PIPELINE | {"megatron_cfg__num_layers_in_first_pipeline_stage": 1}
    layouts: _Layouts = {"first": (2, first), "expert-pipeline": (4, first | _EXPERT)}
    _check(model, outcomes(_cases(model, layouts), tmp_path, timeout_s=patiently(140)), layouts)


def _cases(model: Path, layouts: _Layouts) -> tuple[LayoutCase, ...]:
    return tuple(
        LayoutCase(name=f"{model.name}-{name}", model=model, num_ranks=num_ranks, overrides=overrides)
        for name, (num_ranks, overrides) in (_ONE | layouts).items()
    )


def _resumptions(model: Path, saved: tuple[int, dict[str, Any]], others: _Layouts) -> tuple[LayoutCase, ...]:
    any_layout = {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"}
    num_ranks, layout = saved
    return (
        LayoutCase(name="saved", model=model, num_ranks=num_ranks, overrides=layout | any_layout, saves=True),
        *(
            LayoutCase(name=name, model=model, num_ranks=num, overrides=overrides | any_layout, resumes="saved")
            for name, (num, overrides) in others.items()
        ),
    )


def _check_resumptions(found: dict[str, LayoutOutcome], others: _Layouts) -> None:
    """Weights are those that were saved, bit for bit, and the next step has the same loss and gradients."""
    saved = found["saved"]
    for name in others:
        assert all(torch.equal(found[name].before[key], tensor) for key, tensor in saved.before.items()), name
        assert found[name].metrics == pytest.approx(saved.metrics, rel=1e-4, abs=1e-5), name


def _check(model: Path, found: dict[str, LayoutOutcome], layouts: _Layouts) -> None:
    """Compare log-probabilities, loss, gradient norm, gradients and exported weights of each layout with one rank's."""
    one = found[f"{model.name}-one"]
    store = LocalStore()
    assert torch.allclose(one.logprobs, reference_logprobs(model, random_batch(10, store), store), atol=2e-5, rtol=0)
    on_disk = load_file(model / "model.safetensors")
    compared = {name: _differences(found[f"{model.name}-{name}"], one, on_disk) for name in layouts}
    compared.pop("frozen", None)
    assert not {name: differences for name, differences in compared.items() if differences}


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
    error = (outcome.logprobs - one.logprobs).abs().max().item()
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
