"""Batches split over data-parallel ranks and results brought together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipes.policy.packing import Shard
from recipes.policy.shards import (
    divide,
    merge_metrics,
    merge_optimizer_steps,
    merge_step_metrics,
    optimizer_batches,
    scatter_rows,
    split,
)
from recipes.types import TrainBatch
from tests.configuration import block


def _batch() -> TrainBatch:
    return TrainBatch(
        tokens=("first", "second"),
        group_B=torch.tensor([0, 0, 1, 1]),
        member_B=torch.tensor([0, 1, 0, 1]),
        lengths_B=torch.tensor([3, 2, 3, 1]),
        sample_mask_B=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        advantages_B=torch.tensor([0.0, 1.0, 2.0, 3.0]),
        rewards_B=torch.zeros(4, dtype=torch.float64),
        flag_advantages=(None, -5.0, None, None),
    )


def test_every_shard_gets_its_rows_in_the_order_of_its_microbatches() -> None:
    plan = [Shard(microbatches=((2, 0), (3,))), Shard(microbatches=((1,),))]
    first, second = split(_batch(), plan)
    assert first.microbatches == ((0, 1), (2,))
    assert first.batch.advantages_B.tolist() == [2.0, 0.0, 3.0]
    assert (first.batch.group_B.tolist(), first.batch.member_B.tolist()) == ([1, 0, 1], [0, 0, 1])
    assert second.batch.lengths_B.tolist() == [2]
    assert first.batch.flag_advantages == second.batch.flag_advantages == (None, -5.0, None, None)


def test_a_shard_refers_to_the_groups_of_its_rows_only() -> None:
    first, second = split(_batch(), [Shard(microbatches=((0,), (1,))), Shard(microbatches=((2, 3),))])
    assert (first.batch.tokens, second.batch.tokens) == (("first",), ("second",))
    assert second.batch.group_B.tolist() == [0, 0]


def test_results_return_to_the_order_of_the_batch() -> None:
    plan = [Shard(microbatches=((2, 0), (3,))), Shard(microbatches=((1,),))]
    parts = [torch.tensor([2.0, 2.1, 2.2, 0.0, 0.1, 0.2, 3.0]), torch.tensor([1.0, 1.1])]
    rows = scatter_rows(parts, plan, lengths=[3, 2, 3, 1])
    expected = [[0.0, 0.1, 0.2], [1.0, 1.1], [2.0, 2.1, 2.2], [3.0]]
    assert [row.tolist() for row in rows] == [pytest.approx(row) for row in expected]


def test_metrics_add_up_and_extremes_stay_extremes() -> None:
    shared = {"grad_norm": 2.0, "lr": 1e-6, "skipped_steps": 0.0}
    first = {"loss": 0.25, "probs_ratio_min": 0.5, "probs_ratio_max": 1.5} | shared
    second = first | {"loss": 0.5, "probs_ratio_min": float("inf"), "probs_ratio_max": float("-inf")}
    assert merge_step_metrics([first, second]) == pytest.approx(
        {"loss": 0.75, "probs_ratio_min": 0.5, "probs_ratio_max": 1.5} | shared
    )
    assert merge_step_metrics([second])["probs_ratio_min"] == merge_step_metrics([second])["probs_ratio_max"] == -1.0


def test_means_are_divided_after_the_last_rank() -> None:
    shared = {"grad_norm": 2.0, "lr": 1e-6, "skipped_steps": 0.0}
    first = {"loss": (6.0, 2.0), "masked_correct_pct": (0.0, 0.0), "max_error": 3.0, "min_error": math.inf} | shared
    second = {"loss": (3.0, 1.0), "masked_correct_pct": (0.0, 0.0), "max_error": 5.0, "min_error": math.inf} | shared
    assert merge_step_metrics([first, second]) == pytest.approx(
        {"loss": 3.0, "masked_correct_pct": 0.0, "max_error": 5.0, "min_error": 0.0} | shared
    )


def test_a_loss_that_is_no_number_stays_none() -> None:
    step = {"loss": 0.25, "probs_ratio_max": 1.5, "grad_norm": 2.0, "lr": 1e-6, "skipped_steps": 0.0}
    merged = merge_step_metrics([step, step | {"loss": float("nan"), "probs_ratio_max": float("inf")}])
    assert math.isnan(merged["loss"])
    assert merged["probs_ratio_max"] == float("inf")


def test_a_loss_without_bound_in_both_directions_is_no_number_either() -> None:
    parts = [{"loss": (math.inf, 2.0), "kl": math.inf}, {"loss": (-math.inf, 1.0), "kl": -math.inf}]
    merged = merge_metrics(parts)  # raised on one rank, it would leave the others waiting in a collective
    loss, kl = merged["loss"], merged["kl"]
    assert isinstance(loss, tuple) and math.isnan(loss[0]) and loss[1] == 3.0
    assert isinstance(kl, float) and math.isnan(kl)


def policy_config(*, is_packed: bool) -> Any:
    packing = block(
        "policy.sequence_packing",
        enabled=is_packed,
        train_mb_tokens=8,
        logprob_mb_tokens=16,
        algorithm="first_fit_decreasing",
    )
    return block(
        "policy",
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
    shards = divide(_batch(), policy_config(is_packed=is_packed), num_shards=2, training=training)
    assert [shard.microbatches for shard in shards] == expected


def test_microbatches_follow_each_other_within_a_shard_and_a_shard_may_be_empty() -> None:
    shards = [Shard(microbatches=((2, 0), (3,), (1,))), Shard(microbatches=())]
    first, second = split(_batch(), shards)
    assert first.microbatches == ((0, 1), (2,), (3,))
    assert (second.microbatches, second.batch.tokens, len(second.batch.lengths_B)) == ((), (), 0)
    rows = scatter_rows([torch.tensor([2.0, 0.0, 3.0, 1.0]), torch.zeros(0)], shards, lengths=[1] * 4)
    assert [row.tolist() for row in rows] == [[0.0], [1.0], [2.0], [3.0]]


def test_a_rank_without_an_answer_is_an_error() -> None:
    shards = [Shard(microbatches=((0, 1),)), Shard(microbatches=((2, 3),))]
    with pytest.raises(ValueError, match="zip"):
        scatter_rows([torch.zeros(2)], shards, lengths=[1] * 4)


def test_a_batch_is_cut_into_those_of_its_optimizer_steps() -> None:
    assert optimizer_batches(_batch(), 4)[0].tokens == ("first", "second")
    first, second = optimizer_batches(_batch(), 3)
    assert (first.advantages_B.tolist(), second.advantages_B.tolist()) == ([0.0, 1.0, 2.0], [3.0])
    assert (second.tokens, second.group_B.tolist(), second.member_B.tolist()) == (("second",), [0], [1])


def test_metrics_of_the_optimizer_steps_of_a_batch_add_up() -> None:
    steps = [
        {"loss": (2.0, 4.0), "num_valid_samples": 3.0, "probs_ratio_max": 1.0, "grad_norm": math.nan, "lr": 1e-4},
        {"loss": (4.0, 4.0), "num_valid_samples": 1.0, "probs_ratio_max": 1.5, "grad_norm": 2.0, "lr": 2e-4},
    ]
    merged = merge_step_metrics(
        [
            merge_optimizer_steps(
                [{**step, "skipped_steps": skipped} for step, skipped in zip(steps, (1.0, 0.0), strict=True)]
            )
        ]
    )
    assert merged == {
        "loss": 0.75,
        "num_valid_samples": 4.0,
        "probs_ratio_max": 1.5,
        "grad_norm": 2.0,
        "lr": 2e-4,
        "skipped_steps": 1.0,
    }
