"""What each option of the advantages does, hand-computed on small cases."""

from __future__ import annotations

import math

import pytest
import torch

from recipes.grpo.advantage import (
    add_advantages,
    estimate_advantages,
    group_baseline,
    nll_weights,
    rollout_advantages,
    subtract_group_mean,
    subtract_kl,
    whitening,
)
from tests.configuration import block
from tests.unit.grpo.test_advantage import config, given, policy_row, turn

PAIR, ONE_GROUP = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
VALID = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("normalize", "leave_one_out", "expected"),
    [
        (False, True, [1.0, -1.0]),  # compared with the other one
        (False, False, [0.5, -0.5]),  # compared with both
        (True, False, [0.5 / 0.5**0.5, -0.5 / 0.5**0.5]),  # unbiased deviation of (1, 0): sqrt(1/2)
    ],
)
def test_the_configured_baseline_and_scale_are_used(
    normalize: bool, leave_one_out: bool, expected: list[float]
) -> None:
    cfg = block(
        "grpo.adv_estimator",
        name="grpo",
        normalize_rewards=normalize,
        use_leave_one_out_baseline=leave_one_out,
        minus_baseline=False,
    )
    got = rollout_advantages(PAIR, ONE_GROUP, VALID, torch.ones(2), cfg)
    assert got.tolist() == pytest.approx(expected, rel=1e-5)
    assert got.dtype == torch.float64


def test_the_mean_of_the_group_has_the_member_itself() -> None:
    assert subtract_group_mean(PAIR, ONE_GROUP, VALID).tolist() == [0.5, -0.5]


def test_a_group_without_a_verdict_does_not_end_the_others() -> None:
    rewards = torch.tensor([math.nan, math.nan, 1.0, 0.0], dtype=torch.float32)
    valid = torch.tensor([False, False, True, True])
    groups = torch.tensor([0, 0, 1, 1])
    got = estimate_advantages(rewards, groups, valid, normalize=False, leave_one_out=True)
    assert got.tolist() == [0.0, 0.0, 1.0, -1.0]
    assert got.dtype == torch.float64


def test_members_without_a_verdict_get_zeros_and_no_infinity() -> None:
    for leave_one_out in (True, False):
        rewards, valid = torch.tensor([2.0, math.nan, 4.0]).double(), torch.tensor([True, False, True])
        baseline, deviation = group_baseline(rewards, valid, leave_one_out=leave_one_out)
        assert (baseline[1], deviation[1]) == (0.0, 0.0)
        assert baseline[0] == (4.0 if leave_one_out else 3.0)
        assert deviation[0] == pytest.approx(0.0 if leave_one_out else 2**0.5)


def test_a_range_that_is_far_from_zero_is_no_floor_for_the_deviation() -> None:
    # The deviation of (100.001, 100.000) is 0.0007: small beside 100, and large beside their range of 0.001.
    got = estimate_advantages(
        torch.tensor([100.001, 100.0], dtype=torch.float64), ONE_GROUP, VALID, normalize=True, leave_one_out=False
    )
    assert got.tolist() == pytest.approx([0.0005 / (0.001 / 2**0.5 + 1e-6), -0.0005 / (0.001 / 2**0.5 + 1e-6)])


def test_one_token_alone_has_no_advantage_over_the_batch() -> None:
    batch = whitening(torch.tensor([3.0]), torch.tensor([1.0]))
    assert batch.mean == 3.0
    nothing = whitening(torch.tensor([3.0]), torch.tensor([0.0]))
    assert (nothing.mean, nothing.scale) == (0.0, pytest.approx(1e4))


@pytest.mark.parametrize(("token_level", "expected"), [(True, [1.5, 0.0, 1.5, 0.0]), (False, [0.75, 0.0, 0.75, 0.0])])
def test_positive_examples_weigh_by_the_unit_that_the_loss_counts(token_level: bool, expected: list[float]) -> None:
    # 6 tokens or 3 sequences in the loss; the rollouts with a reward have 1 and 3 tokens, the last has none.
    cfg = block("loss_fn", token_level_loss=token_level, positive_example_nll_weight=1.0)
    rewards, tokens = torch.tensor([1.0, 0.0, 0.5, 1.0]), torch.tensor([1.0, 2.0, 3.0, 0.0])
    assert nll_weights(rewards, tokens, cfg).tolist() == expected


def test_a_lone_token_with_a_reward_is_weighed_by_one() -> None:
    cfg = block("loss_fn", token_level_loss=True, positive_example_nll_weight=1.0)
    assert nll_weights(torch.tensor([1.0]), torch.tensor([1.0]), cfg).tolist() == [1.0]


def test_each_bound_clips_its_own_side() -> None:
    batch, groups = given([9.0, 0.0], [0, 0], [1.0, 1.0])
    for low, high, expected in ((None, 2.0, [2.0, -9.0]), (-2.0, None, [9.0, -2.0]), (-3.0, 4.0, [4.0, -3.0])):
        got, metrics = add_advantages(batch, groups, config(advantage_clip_low=low, advantage_clip_high=high))
        assert got.advantages_B.tolist() == expected
        assert (metrics["advantages/max"], metrics["advantages/min"]) == tuple(expected)


def test_a_turn_of_malformed_thinking_has_the_advantage_of_its_own() -> None:
    turns = {0: (turn(1, has_malformed_thinking=True), turn(1, prompt=1))}
    options = {"invalid_tool_call_advantage": None, "malformed_thinking_advantage": -3.0}
    got, metrics = add_advantages(*given([1.0, 0.0], [0, 0], [1.0, 1.0], turns), config(**options))
    values = [value for value in got.flag_advantages if value is not None]
    assert values and set(values) == {-3.0}
    # One token of the flagged turn, one of the other turn, three of the rollout without a reward.
    assert metrics["advantages/mean"] == pytest.approx((-3.0 + 1.0 - 3 * 1.0) / 5)
    assert metrics["advantages/min"] == -3.0
    assert (metrics["num_malformed_thinking"], metrics["malformed_thinking_rate"]) == (1.0, pytest.approx(1 / 3))


def test_a_batch_without_a_token_in_the_loss_has_all_statistics() -> None:
    _, metrics = add_advantages(*given([1.0, 0.0], [0, 0], [0.0, 0.0]), config())
    assert {name: metrics[f"advantages/{name}"] for name in ("mean", "max", "min", "clip_fraction")} == {
        "mean": 0.0,
        "max": 0.0,
        "min": 0.0,
        "clip_fraction": 0.0,
    }


def test_extremes_of_token_advantages_are_of_sampled_tokens() -> None:
    def no_kl(logprobs: torch.Tensor, _reference: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logprobs)

    rows = [
        policy_row(3.0, [0.0, -1.0], [0.0, -1.0], [0.0, 1.0]),
        policy_row(1.0, [-1.0], [-1.0], [1.0]),
        policy_row(99.0, [-1.0], [-1.0], [0.0]),  # not in the loss
    ]
    _, metrics = subtract_kl(rows, lambda own: own, kl=no_kl, weight=0.0)
    assert metrics["token_advantages_max"] == pytest.approx(1.0)
    assert metrics["token_advantages_min"] == pytest.approx(-1.0)
    _, nothing = subtract_kl(rows[2:], lambda own: own, kl=no_kl, weight=0.0)
    assert (nothing["token_advantages_min"], nothing["token_advantages_max"]) == (math.inf, -math.inf)
