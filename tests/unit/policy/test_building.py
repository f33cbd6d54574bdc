"""A trainer is built in the memory that training takes: no device holds the weights twice, not even for a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import one_rank, trainer_of
from policy_case import load_case, save_model
from safetensors.torch import load_file

from recipes.policy import optimizer


@pytest.mark.parametrize("is_distributed", [True, False], ids=["distributed", "plain"])
def test_weights_are_loaded_into_the_buffers_that_they_stay_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_distributed: bool
) -> None:
    wrap = optimizer.wrap_ddp
    held: list[int] = []

    def measured(model: torch.nn.Module, *others: Any) -> Any:
        storages = {param.data_ptr(): param.untyped_storage().nbytes() for param in model.parameters()}
        held.append(sum(storages.values()))
        return wrap(model, *others)

    monkeypatch.setattr(optimizer, "wrap_ddp", measured)
    values: dict[str, Any] = {
        "megatron_cfg__optimizer__use_distributed_optimizer": is_distributed,
        "megatron_cfg__distributed_data_parallel_config__overlap_param_gather": is_distributed,
    }
    config = load_case(save_model(tmp_path / "model"), **values)
    with one_rank(config):
        trainer = trainer_of(config)
        loaded = {name: tensor.clone() for name, tensor in trainer.export()}
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.items())
    total = sum(tensor.nbytes for tensor in weights.values())
    assert held[0] < total / 100 if is_distributed else held[0] >= total
