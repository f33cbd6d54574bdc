"""Layers of experts are built as the configuration asks; that they compute the same is for the tests of layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from head_reference import add_heads
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_hybrid
from safetensors.torch import load_file

from recipes.policy import checkpoint, step
from recipes.policy.export import export_checkpoint
from recipes.types import experts_of
from tests import grouped_linear

GROUPED = {"megatron_cfg__moe_grouped_gemm": "true"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid") / "model", moe_latent_size=None)


def layers_of(trainer: step.Trainer) -> list[Any]:
    return [module for module in trainer.model.modules() if hasattr(module, "token_dispatcher")]


@pytest.mark.parametrize(("dispatcher", "name"), [("alltoall", "MoEAlltoAll"), ("allgather", "UnevenAllGather")])
def test_tokens_reach_their_experts_as_asked(model: Path, dispatcher: str, name: str) -> None:
    config = load_case(model, megatron_cfg__moe_token_dispatcher_type=dispatcher)
    with one_rank(config):
        layers = layers_of(trainer_of(config))
    assert layers and all(type(layer.token_dispatcher).__name__.startswith(name) for layer in layers)
    assert all(layer.config.variable_seq_lengths for layer in layers), "pipeline stages tell each other the lengths"


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_shared_expert_runs_beside_the_exchange_where_it_is_asked(model: Path, is_asked: bool) -> None:
    config = load_case(model, megatron_cfg__moe_shared_expert_overlap=str(is_asked).lower())
    with one_rank(config):
        layers = layers_of(trainer_of(config))
    assert layers and all((layer.token_dispatcher.shared_experts is not None) == is_asked for layer in layers)


def check_blocks(pushed: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """A push has all weights; all experts of this one rank are one tensor per matrix, those of the heads too."""
    blocks = {name: experts for name in pushed if (experts := experts_of(name)) is not None}
    assert any(name.startswith("mtp.") for name in blocks) and not any(".experts.0." in name for name in pushed)
    ones = {name: tensor for name, tensor in pushed.items() if name not in blocks}
    for name, experts in blocks.items():
        ones |= zip(experts, pushed[name].unbind(), strict=True)
    assert ones.keys() == weights.keys()
    assert all(torch.equal(ones[name], tensor) for name, tensor in weights.items())


def test_experts_of_model_and_heads_are_grouped_where_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With latent experts; the stand-in refuses a call that would overwrite gradients of the heads' other calls."""
    grouped_linear.stand_in(monkeypatch.setattr)
    model = add_heads(save_hybrid(tmp_path / "model"))
    (tmp_path / "saved").mkdir()
    metrics, weights = [], []
    for experts in ({}, GROUPED):
        config = load_case(model, megatron_cfg__mtp_num_layers=2, **experts)
        with one_rank(config):
            trainer = trainer_of(config)
            assert trainer.heads is not None
            layers = [*layers_of(trainer), trainer.heads.moe.mlp]
            metrics.append(step.train_step(trainer, shard_of(0)))
            weights.append({name: tensor.clone() for name, tensor in trainer.export()})
            check_blocks(dict(trainer.pushed()), weights[-1])
            if experts:
                checkpoint.save(trainer, tmp_path / "saved")
        kind = "TEGroupedMLP" if experts else "SequentialMLP"
        assert {type(layer.experts).__name__ for layer in layers} == {kind}
    assert metrics[1] == {name: pytest.approx(value, rel=1e-4) for name, value in metrics[0].items()}
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[1][name], tensor, atol=1e-5) for name, tensor in weights[0].items())
    # The export builds plain experts, whatever the run had: it needs neither CUDA nor Transformer Engine.
    export_checkpoint(tmp_path / "saved", tmp_path / "out", load_case(model, **GROUPED).policy)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == weights[1].keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights[1].items())
