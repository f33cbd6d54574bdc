"""Multi-token heads: trained beside the policy as in plain torch, under every layout, or carried as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from head_reference import add_heads, heads_of_batch
from layout_ranks import LayoutCase, LayoutOutcome, outcomes
from policy_case import save_hybrid
from safetensors.torch import load_file
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

_NUM_HEADS = 3
_TRAINED = {"megatron_cfg__mtp_num_layers": _NUM_HEADS}
_HEALED = _TRAINED | {"megatron_cfg__freeze_trunk": "true"}
_OVERLAP = {"megatron_cfg__distributed_data_parallel_config__overlap_grad_reduce": "true"}
_SEQUENCE = {"megatron_cfg__tensor_model_parallel_size": 2, "megatron_cfg__sequence_parallel": "true"}
_RECOMPUTE = {"megatron_cfg__activation_checkpointing": "true", "logprob_chunk_size": 24}
_EXPERT = {"megatron_cfg__expert_model_parallel_size": 2}
_CONTEXT = {"megatron_cfg__context_parallel_size": 2}
_STAGES = {"megatron_cfg__pipeline_model_parallel_size": 2}
_ANY_LAYOUT = {"megatron_cfg__dist_ckpt_optim_fully_reshardable": "true"}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "sequence": _SEQUENCE | _RECOMPUTE | _OVERLAP,
    "context-expert": _CONTEXT | _EXPERT,
    "data": _OVERLAP,
    "stages": _STAGES | _RECOMPUTE | _OVERLAP,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_heads(save_hybrid(tmp_path_factory.mktemp("heads") / "model"))


@pytest.fixture(scope="module")
def found(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutOutcome]:
    def case(name: str, num_ranks: int, overrides: dict[str, Any], **more: Any) -> LayoutCase:
        return LayoutCase(name=name, model=model, num_ranks=num_ranks, overrides=overrides, **more)

    cases = (
        case("one", 1, _TRAINED),
        case("carried", 1, {}),
        case("carried-stages", 2, _STAGES, trains=False),
        *(case(name, 2, _TRAINED | overrides) for name, overrides in _LAYOUTS.items()),
        case("saved", 2, _TRAINED | _SEQUENCE | _ANY_LAYOUT, saves=True),
        case("resumed", 1, _TRAINED | _ANY_LAYOUT, resumes="saved"),
        case("saved-stages", 2, _TRAINED | _STAGES | _ANY_LAYOUT, saves=True),
        case("resumed-stages", 2, _TRAINED | _STAGES, resumes="saved-stages"),
        case("resumed-on-one", 1, _TRAINED | _ANY_LAYOUT, resumes="saved-stages"),
        case("healed", 1, _HEALED),
        *(case(f"healed-{name}", 2, _HEALED | overrides) for name, overrides in _LAYOUTS.items()),
        case("healed-saved", 2, _HEALED | _STAGES | _ANY_LAYOUT, saves=True),
        case("healed-resumed", 1, _HEALED | _ANY_LAYOUT, resumes="healed-saved"),
    )
    return outcomes(cases, tmp_path_factory.mktemp("job"), timeout_s=patiently(220))


def test_heads_learn_what_the_formula_says(model: Path, found: dict[str, LayoutOutcome]) -> None:
    losses, gradients = heads_of_batch(model, _NUM_HEADS)
    one = found["one"]
    assert [one.metrics[f"mtp/mtp_{k}_loss"] for k in range(1, _NUM_HEADS + 1)] == pytest.approx(losses, rel=1e-5)
    assert one.metrics["mtp/grad_norm"] == pytest.approx(
        torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item(), rel=1e-4
    )
    for name, expected in gradients.items():
        assert torch.allclose(one.gradients[name], expected, rtol=1e-4, atol=2e-5 * expected.abs().max().item()), name


def test_the_policy_does_not_notice_its_heads(found: dict[str, LayoutOutcome]) -> None:
    trained, carried = found["one"], found["carried"]
    for name, gradient in carried.gradients.items():
        if name.startswith("mtp."):
            assert not gradient.any() and trained.gradients[name].any(), name
        else:
            assert torch.equal(trained.gradients[name], gradient), name
    assert {name: trained.metrics[name] for name in carried.metrics} == carried.metrics


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_layouts_train_heads_as_one_rank(found: dict[str, LayoutOutcome], layout: str) -> None:
    one, other = found["one"], found[layout]
    assert {name for name in one.metrics if name.startswith("mtp/")} >= {"mtp/grad_norm", "mtp/mtp_1_loss"}
    for name, value in one.metrics.items():
        if name.startswith("mtp/") or name == "grad_norm":
            assert other.metrics[name] == pytest.approx(value, rel=1e-5), name
    for name, expected in one.gradients.items():
        limit = 1e-5 * max(expected.abs().max().item(), 1e-9)
        assert (other.gradients[name] - expected).abs().max().item() < limit, name


@pytest.mark.parametrize("name", ["healed", *(f"healed-{layout}" for layout in _LAYOUTS)])
def test_healing_trains_heads_as_beside_the_policy_and_nothing_else(found: dict[str, LayoutOutcome], name: str) -> None:
    one, healed = found["one"], found[name]
    for key in [key for key in one.metrics if key.startswith("mtp/")]:
        assert healed.metrics[key] == pytest.approx(one.metrics[key], rel=1e-5), key
    for key, expected in one.gradients.items():
        if key.startswith("mtp."):
            limit = 1e-5 * max(expected.abs().max().item(), 1e-9)
            assert (healed.gradients[key] - expected).abs().max().item() < limit, key
        else:
            assert not healed.gradients[key].any(), key  # bit for bit, the routers' biases, too


@pytest.mark.parametrize("name", ["one", "carried", "carried-stages", *_LAYOUTS])
def test_what_was_imported_is_exported(model: Path, found: dict[str, LayoutOutcome], name: str) -> None:
    on_disk, outcome = load_file(model / "model.safetensors"), found[name]
    assert outcome.before.keys() == on_disk.keys() == {name for name, *_ in outcome.shapes}
    assert all(torch.equal(outcome.before[key], tensor) for key, tensor in on_disk.items())


@pytest.mark.parametrize(
    ("before", "later"),
    [
        ("saved", "resumed"),
        ("saved-stages", "resumed-stages"),
        ("saved-stages", "resumed-on-one"),
        ("healed-saved", "healed-resumed"),
    ],
)
def test_checkpoints_hold_heads_and_their_moments(found: dict[str, LayoutOutcome], before: str, later: str) -> None:
    saved, resumed = found[before], found[later]
    assert all(torch.equal(resumed.before[key], tensor) for key, tensor in saved.before.items())
    assert resumed.metrics == pytest.approx(saved.metrics, rel=1e-4, abs=1e-5)
    after = {name: saved.gradients[name] - gradient for name, gradient in resumed.gradients.items()}
    moved = max(gradient.abs().max().item() for gradient in saved.gradients.values())
    assert all(difference.abs().max().item() < 1e-2 * moved for difference in after.values())
