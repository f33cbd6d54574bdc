"""Layers of experts are built as the configuration asks; that they compute the same is for the tests of layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_rank import one_rank, trainer_of
from policy_case import load_case, save_hybrid

from recipes.policy import step


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
