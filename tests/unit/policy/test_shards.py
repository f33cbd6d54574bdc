"""Batches split over data-parallel ranks and results brought together."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.policy.packing import Shard
from recipes.policy.shards import merge_step_metrics, plan, scatter_rows, split
from recipes.types import TrainBatch


def _batch() -> TrainBatch:
    ids_BS = torch.arange(12).view(4, 3)
    return TrainBatch(
        input_ids_BS=ids_BS,
        input_lengths_B=torch.tensor([3, 2, 3, 1]),
        token_mask_BS=torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]),
        sample_mask_B=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        generation_logprobs_BS=torch.zeros(4, 3),
        advantages_BS=torch.zeros(4, 3),
        rewards_B=torch.zeros(4, dtype=torch.float64),
        group_B=torch.tensor([0, 0, 1, 1]),
    )


def test_every_shard_gets_its_rows_in_the_order_of_its_microbatches() -> None:
    plan = [Shard(microbatches=((2, 0), (3,))), Shard(microbatches=((1,),))]
    first, second = split(_batch(), plan)
    assert first.microbatches == ((0, 1), (2,))
    assert first.batch.input_ids_BS[:, 0].tolist() == [6, 0, 9]
    assert second.batch.input_lengths_B.tolist() == [2]


def test_results_return_to_the_order_of_the_batch() -> None:
    plan = [Shard(microbatches=((2, 0), (3,))), Shard(microbatches=((1,),))]
    parts = [torch.tensor([[2.0], [0.0], [3.0]]), torch.tensor([[1.0]])]
    assert scatter_rows(parts, plan, shape=(4, 1)).tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_metrics_add_up_and_extremes_stay_extremes() -> None:
    first = {"loss": 0.25, "probs_ratio_min": 0.5, "probs_ratio_max": 1.5, "grad_norm": 2.0, "lr": 1e-6}
    second = first | {"loss": 0.5, "probs_ratio_min": float("inf"), "probs_ratio_max": float("-inf")}
    assert merge_step_metrics([first, second]) == pytest.approx(
        {"loss": 0.75, "probs_ratio_min": 0.5, "probs_ratio_max": 1.5, "grad_norm": 2.0, "lr": 1e-6}
    )
    assert merge_step_metrics([second])["probs_ratio_min"] == merge_step_metrics([second])["probs_ratio_max"] == -1.0


def test_means_are_divided_after_the_last_rank() -> None:
    shared = {"grad_norm": 2.0, "lr": 1e-6}
    first = {"loss": (6.0, 2.0), "masked_correct_pct": (0.0, 0.0), "max_error": 3.0, "min_error": math.inf} | shared
    second = {"loss": (3.0, 1.0), "masked_correct_pct": (0.0, 0.0), "max_error": 5.0, "min_error": math.inf} | shared
    assert merge_step_metrics([first, second]) == pytest.approx(
        {"loss": 3.0, "masked_correct_pct": 0.0, "max_error": 5.0, "min_error": 0.0} | shared
    )


def test_a_loss_that_is_no_number_stays_none() -> None:
    step = {"loss": 0.25, "probs_ratio_max": 1.5, "grad_norm": 2.0, "lr": 1e-6}
    merged = merge_step_metrics([step, step | {"loss": float("nan"), "probs_ratio_max": float("inf")}])
    assert math.isnan(merged["loss"])
    assert merged["probs_ratio_max"] == float("inf")


def policy_config(*, is_packed: bool) -> Any:
    packing = SimpleNamespace(
        enabled=is_packed, train_mb_tokens=8, logprob_mb_tokens=16, algorithm="first_fit_decreasing"
    )
    return SimpleNamespace(
        sequence_packing=packing,
        train_micro_batch_size=1,
        logprob_batch_size=2,
        make_sequence_length_divisible_by=4,
    )


@pytest.mark.parametrize(
    ("is_packed", "training", "expected"),
    [
        (False, True, [((0,), (1,)), ((2,), (3,))]),
        (False, False, [((0, 1),), ((2, 3),)]),
        (True, True, [((3, 2),), ((1, 0),)]),  # each of 3, 2, 3, 1 tokens takes 4 of a bin's 8
        (True, False, [((3, 2, 1),), ((0,),)]),  # one bin of 16 holds all; the second rank gets one of them
    ],
)
def test_the_plan_follows_the_configuration_of_training_or_log_probabilities(
    is_packed: bool, training: bool, expected: list[tuple[tuple[int, ...], ...]]
) -> None:
    shards = plan(_batch(), policy_config(is_packed=is_packed), num_shards=2, training=training)
    assert [shard.microbatches for shard in shards] == expected


def test_microbatches_follow_each_other_within_a_shard_and_a_shard_may_be_empty() -> None:
    shards = [Shard(microbatches=((2, 0), (3,), (1,))), Shard(microbatches=())]
    first, second = split(_batch(), shards)
    assert first.microbatches == ((0, 1), (2,), (3,))
    assert (second.microbatches, second.batch.input_ids_BS.shape) == ((), (0, 3))
    parts = [torch.tensor([[2.0], [0.0], [3.0], [1.0]]), torch.zeros(0, 1)]
    assert scatter_rows(parts, shards, shape=(4, 1)).tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_a_rank_without_an_answer_is_an_error() -> None:
    shards = [Shard(microbatches=((0, 1),)), Shard(microbatches=((2, 3),))]
    with pytest.raises(ValueError, match="zip"):
        scatter_rows([torch.zeros(2, 1)], shards, shape=(4, 1))
