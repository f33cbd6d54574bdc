"""Ragged rows through shards and packed microbatches give the loss, gradients and metrics of one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_batch import batch_of, padded, random_rollouts
from torch import Tensor

from recipes.config.load import BASE, load_config
from recipes.config.tree import Config
from recipes.grpo.loss import grpo_loss
from recipes.policy.microbatch import pack_microbatch
from recipes.policy.shards import divide, merge_metrics, merge_step_metrics, split
from recipes.policy.step import loss_inputs
from recipes.types import Rollout, TrainBatch
from tests.groups import LocalStore

VOCAB = 12


@pytest.fixture(scope="module")
def config() -> Config:
    loaded = load_config(Path(BASE), ["loss_fn.truncated_importance_sampling_ratio=2.0"]).repaired
    assert loaded is not None
    return loaded


def bigram_logprobs(weights_VV: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label after its token: a model that needs no more than the pair."""
    return weights_VV[tokens].log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def of_padded(
    weights_VV: Tensor, rollouts: Sequence[Rollout], batch: TrainBatch, config: Config
) -> tuple[Tensor, dict[str, float]]:
    ids_BS, inputs = padded(rollouts, batch)
    current_BT = bigram_logprobs(weights_VV, ids_BS[:, :-1], ids_BS[:, 1:])
    inputs = replace(inputs, prev_logprobs_BT=current_BT.detach(), nll_weight_B=batch.nll_weight_B)
    sums = grpo_loss(current_BT, inputs, cfg=config.loss_fn, mismatch_threshold=30.0)
    step = {"grad_norm": 0.0, "lr": 0.0, "skipped_steps": 0.0}
    return sums.loss / sums.count, merge_step_metrics([step | numbers(sums.metrics)])


def numbers(metrics: object) -> dict[str, float | tuple[float, float]]:
    assert isinstance(metrics, dict)
    return {
        name: (float(value[0]), float(value[1])) if isinstance(value, tuple) else float(value)
        for name, value in metrics.items()
    }


def of_ragged(
    weights_VV: Tensor, batch: TrainBatch, config: Config, *, num_ranks: int
) -> tuple[Tensor, dict[str, float]]:
    losses, counts, ranks = [], [], []
    shards = split(batch, divide(batch, config.policy, num_shards=num_ranks, training=True))
    for shard in (one.fetched(LocalStore()) for one in shards):
        measured = []
        for rows in shard.microbatches:
            ids = [shard.row(row).token_ids for row in rows]
            packed = pack_microbatch(ids, rows, multiple=4, row_multiple=1, where=torch.device("cpu"))
            logprobs_1T = bigram_logprobs(weights_VV, packed.tokens_1T, packed.labels_1T)
            inputs, current_BT = loss_inputs(shard, packed, logprobs_1T)
            sums = grpo_loss(current_BT, inputs, cfg=config.loss_fn, mismatch_threshold=30.0)
            losses.append(sums.loss)
            counts.append(sums.count)
            measured.append(numbers(sums.metrics))
        ranks.append({"grad_norm": 0.0, "lr": 0.0, "skipped_steps": 0.0} | merge_metrics(measured))
    return sum(losses, torch.zeros(())) / sum(counts, torch.zeros(())), merge_step_metrics(ranks)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ragged_rows_equal_a_padded_batch(config: Config, seed: int, num_ranks: int, is_packed: bool) -> None:
    packing = replace(config.policy.sequence_packing, enabled=is_packed, train_mb_tokens=64)
    policy = replace(
        config.policy, sequence_packing=packing, make_sequence_length_divisible_by=4, train_micro_batch_size=3
    )
    config = replace(config, policy=policy)
    rollouts = random_rollouts(12, seed=seed, vocab=VOCAB)
    batch = batch_of(rollouts, LocalStore(), size=4, seed=seed)
    batch = replace(batch, nll_weight_B=torch.rand(12))
    assert not batch.sample_mask_B.all()
    assert max(len(rollout.turns) for rollout in rollouts) > 1

    weights_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    loss, metrics = of_padded(weights_VV, rollouts, batch, config)
    (gradient,) = torch.autograd.grad(loss, weights_VV)
    got_loss, got_metrics = of_ragged(weights_VV, batch, config, num_ranks=num_ranks)
    (got_gradient,) = torch.autograd.grad(got_loss, weights_VV)

    assert gradient.abs().max() > 0.01
    assert got_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    assert (got_gradient - gradient).abs().max() < 1e-6
    assert got_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-6)
