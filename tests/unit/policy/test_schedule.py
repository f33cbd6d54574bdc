"""The schedule counts batches, as a run counts its steps, and not the optimizer steps that a batch is divided into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_rank import one_rank, shard_of, trainer_of
from policy_case import load_case, save_model

from recipes.policy import step


@pytest.mark.parametrize("num_parts", [1, 2])
def test_rates_rise_once_per_batch(tmp_path: Path, num_parts: int) -> None:
    config = load_case(save_model(tmp_path / "model"))  # from 1e-4 to 1e-3 in two steps
    good, bad = shard_of(0), shard_of(1, advantages_B=torch.full((4,), torch.inf))
    with one_rank(config):
        trainer = trainer_of(config)
        batches = [[good] * num_parts, [bad] * num_parts, [bad] * (num_parts - 1) + [good], [good] * num_parts]
        metrics = [step.train_steps(trainer, parts) for parts in batches]
    assert [one["lr"] for one in metrics] == pytest.approx([1e-4, 5.5e-4, 5.5e-4, 1e-3])
    assert [one["skipped_steps"] for one in metrics] == [0.0, num_parts, num_parts - 1, 0.0]
