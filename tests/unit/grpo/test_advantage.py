"""Advantages where the reference is numerically wrong or silent: hand-computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from recipes.config.keys.derive import has_group_baseline, rewards_teach
from recipes.config.tree.grpo import AdvEstimatorConfig
from recipes.grpo.advantage import (
    ALGORITHMS,
    HEALING,
    add_advantages,
    algorithm_of,
    distil,
    estimate_advantages,
    group_baseline,
    subtract_kl,
)
from recipes.grpo.batch import build_batch
from recipes.policy.shards import BatchShard
from recipes.types import Group, PolicyRow, Rollout, RolloutStatus, TrainBatch, Turn
from tests.configuration import block
from tests.configuration import config as stage_config
from tests.groups import group_of


def advantages(rewards: list[float], *, valid: list[bool] | None = None, **options: Any) -> list[float]:
    valid_B = torch.tensor(valid or [True] * len(rewards))
    group_B = torch.zeros(len(rewards), dtype=torch.int64)
    options = {"normalize": True, "leave_one_out": True, **options}
    return estimate_advantages(torch.tensor(rewards, dtype=torch.float64), group_B, valid_B, **options).tolist()


def test_lone_winner_by_hand() -> None:
    # Winner: the others are all 0, deviation 0, plain difference 1. Loser: others are fourteen 0 and one 1,
    # mean 1/15, unbiased deviation sqrt(1/15), so -(1/15) / sqrt(1/15) = -sqrt(1/15).
    got = advantages([1.0] + [0.0] * 15)
    assert got[0] == pytest.approx(1.0)
    assert got[1:] == pytest.approx([-((1 / 15) ** 0.5)] * 15, rel=1e-5)


@pytest.mark.parametrize("base", [0.1, 0.27, 0.3, 0.7])
def test_equal_rewards_that_float32_cannot_hold_do_not_explode(base: float) -> None:
    got = advantages([base + 0.01] + [base] * 15)
    assert got[0] == pytest.approx(0.01)
    assert max(abs(value) for value in got) < 1.0


def test_noise_below_the_floor_is_not_divided_by() -> None:
    got = advantages([1.0, 1e-5, 0.0, 0.0])
    assert got[0] == pytest.approx(1.0 - 1e-5 / 3)


def test_all_equal_is_exactly_zero() -> None:
    assert advantages([0.3] * 7) == [0.0] * 7


def test_invalid_members_do_not_vote() -> None:
    # With a mean baseline and the second 1 masked: mean of (1, 0, 0) is 1/3.
    got = advantages([1.0, 1.0, 0.0, 0.0], valid=[True, False, True, True], normalize=False, leave_one_out=False)
    assert got == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])


def test_nan_of_a_missing_verdict_does_not_spread() -> None:
    got = advantages([1.0, float("nan"), 0.0], valid=[True, False, True])
    assert got == pytest.approx([1.0, 0.0, -1.0])


def test_alone_in_the_group_there_is_no_signal() -> None:
    baseline, std = group_baseline(torch.tensor([3.0]), torch.tensor([True]), leave_one_out=True)
    assert (baseline.item(), std.item()) == (3.0, 0.0)


def test_groups_are_told_apart_by_number() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 5.0], dtype=torch.float64)
    got = estimate_advantages(
        rewards, torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), normalize=False, leave_one_out=True
    )
    assert got.tolist() == [1.0, -1.0, 0.0, 0.0]


def turn(sampled: int, *, prompt: int = 0, **flags: bool) -> Turn:
    ids = tuple(range(sampled))
    return Turn(
        prompt_token_ids=(9,) * prompt,
        token_ids=ids,
        logprobs=(-1.0,) * sampled,
        versions=(),
        finish_reason="stop",
        **flags,
    )


def given(
    rewards: list[float], groups: list[int], sample_mask: list[float], turns: dict[int, tuple[Turn, ...]] | None = None
) -> tuple[TrainBatch, list[Group]]:
    """Return a batch of rollouts and their groups; a row without `turns` has one prompt and three sampled tokens."""
    rollouts = [
        Rollout(
            turns=(turns or {}).get(row, (turn(3, prompt=1),)), status=RolloutStatus.COMPLETED, reason="", reward=reward
        )
        for row, reward in enumerate(rewards)
    ]
    members = [[r for r, own in zip(rollouts, groups, strict=True) if own == group] for group in sorted(set(groups))]
    headers = [group_of(one) for one in members]
    rewards_B = torch.tensor(rewards, dtype=torch.float64)
    batch = build_batch(headers, rewards_B, overlong_filtering=False, mask_flagged=False)
    return replace(batch, sample_mask_B=torch.tensor(sample_mask)), headers


def expanded(batch: TrainBatch) -> list[list[float]]:
    """Return the advantage of every token, row by row, as a rank has it."""
    shard = BatchShard(batch=batch, microbatches=())
    own = batch.advantages_B.tolist()
    return [shard.row(row).advantages(own[row], batch.flag_advantages).tolist() for row in range(len(own))]


def config(**options: Any) -> Any:
    defaults = {
        "advantage_clip_low": -50.0,
        "advantage_clip_high": 50.0,
        "invalid_tool_call_advantage": -5.0,
        "malformed_thinking_advantage": None,
        "adv_estimator": block(
            "grpo.adv_estimator", name="grpo", normalize_rewards=False, use_leave_one_out_baseline=True
        ),
    }
    loss = block(
        "loss_fn",
        reference_policy_kl_penalty=0.1,
        token_level_loss=True,
        positive_example_nll_weight=options.pop("nll", 0.0),
        use_kl_in_reward=options.pop("use_kl_in_reward", False),
    )
    megatron = block("policy.megatron_cfg", freeze_trunk=options.pop("freeze_trunk", False))
    policy = block("policy", megatron_cfg=megatron)
    return stage_config(grpo=block("grpo", **{**defaults, **options}), loss_fn=loss, policy=policy)


def test_a_group_left_with_one_member_does_not_train() -> None:
    batch, groups = given([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [1.0, 1.0, 1.0, 0.0])
    got, _ = add_advantages(batch, groups, config())
    assert got.sample_mask_B.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert got.advantages_B.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_a_clip_that_is_off_bounds_nothing() -> None:
    turns = {0: (turn(1, prompt=1, is_invalid_tool_call=True), turn(2))}
    batch, groups = given([1.0, 0.0], [0, 0], [1.0, 1.0], turns)
    off = {"advantage_clip_low": None, "advantage_clip_high": None, "invalid_tool_call_advantage": -500.0}
    got, metrics = add_advantages(batch, groups, config(**off))
    assert expanded(got) == [[1.0, -500.0, 1.0, 1.0], [-1.0] * 4]
    assert metrics["advantages/clip_fraction"] == 0.0
    got, _ = add_advantages(batch, groups, config(**off | {"advantage_clip_low": -2.0}))
    assert expanded(got)[0] == [1.0, -2.0, 1.0, 1.0]


def test_flagged_turn_then_clip() -> None:
    turns = {0: (turn(2, prompt=1, is_invalid_tool_call=True), turn(0, prompt=1))}
    got, metrics = add_advantages(*given([1.0, 0.0], [0, 0], [1.0, 1.0], turns), config(advantage_clip_low=-0.5))
    assert expanded(got) == [[1.0, -0.5, -0.5, 1.0], [-0.5, -0.5, -0.5, -0.5]]
    assert metrics["invalid_tool_call_rate"] == pytest.approx(1 / 3)
    assert (metrics["num_assistant_messages"], metrics["num_invalid_tool_calls"]) == (3.0, 1.0)
    assert metrics["num_malformed_thinking"] == metrics["malformed_thinking_rate"] == 0.0
    assert metrics["advantages/clip_fraction"] == 1.0  # the two of the first row, the three of the second


def test_what_is_out_of_the_loss_is_in_no_statistic_of_the_advantages() -> None:
    # Of the first group one member is masked, the second has one valid member left; the flagged turn is masked, too.
    nan = float("nan")
    turns = {2: (turn(3, prompt=1, is_invalid_tool_call=True),)}
    batch, groups = given([1.0, 0.0, 9.0, 5.0, nan], [0, 0, 0, 1, 1], [1.0, 1.0, 0.0, 1.0, 0.0], turns)
    got, metrics = add_advantages(batch, groups, config())
    assert got.sample_mask_B.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert expanded(got)[:2] == [[1.0] * 4, [-1.0] * 4]
    assert (metrics["advantages/min"], metrics["advantages/mean"], metrics["advantages/max"]) == (-1.0, 0.0, 1.0)
    assert metrics["advantages/clip_fraction"] == 0.0
    assert metrics["num_zero_advantage_groups"] == 1.0


def test_a_valid_reward_that_is_masked_does_not_make_a_group() -> None:
    got, metrics = add_advantages(*given([1.0, 0.0], [0, 0], [1.0, 0.0]), config())
    assert got.sample_mask_B.tolist() == [0.0, 0.0]
    assert (metrics["advantages/min"], metrics["advantages/mean"], metrics["advantages/max"]) == (0.0, 0.0, 0.0)


def test_rates_are_per_turn_and_groups_without_signal_are_counted() -> None:
    turns = {0: (turn(3, prompt=1, has_malformed_thinking=True),), 4: (), 5: ()}
    batch, groups = given([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1, 2, 2], [1.0] * 6, turns)
    _, metrics = add_advantages(batch, groups, config())
    assert metrics["malformed_thinking_rate"] == 0.25
    assert metrics["num_zero_advantage_groups"] == 2.0


REINFORCE = {"name": "reinforce_plus_plus", "minus_baseline": False}


def test_reinforce_plus_plus_by_hand() -> None:
    # Three tokens each: the batch's mean is 3/4, its variance (1/16 + 9/16 + 1/16 + 1/16) / 4 = 3/16.
    got, metrics = add_advantages(
        *given([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [1.0] * 4),
        config(adv_estimator=block("grpo.adv_estimator", **REINFORCE)),
    )
    deviation = (3 / 16) ** 0.5
    assert got.advantages_B.tolist() == pytest.approx([0.25 / deviation, -0.75 / deviation] + [0.25 / deviation] * 2)
    assert metrics["advantages/mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["num_zero_advantage_groups"] == 0.0


def test_reinforce_plus_plus_weighs_rollouts_by_their_tokens_in_the_loss() -> None:
    # With 1 and 3 tokens the mean of rewards 1 and 0 is 1/4, the variance 1/4 * 9/16 + 3/4 * 1/16 = 3/16.
    batch, groups = given([1.0, 0.0, 9.0], [0, 0, 0], [1.0, 1.0, 0.0], {0: (turn(1, prompt=1),)})
    got, _ = add_advantages(batch, groups, config(adv_estimator=block("grpo.adv_estimator", **REINFORCE)))
    deviation = (3 / 16) ** 0.5
    assert got.advantages_B[:2].tolist() == pytest.approx([0.75 / deviation, -0.25 / deviation])


def test_the_baseline_of_the_group_leaves_only_differences_inside_groups() -> None:
    estimator = block("grpo.adv_estimator", **REINFORCE | {"minus_baseline": True})
    got, _ = add_advantages(*given([1.0, 0.0, 7.0, 7.0], [0, 0, 1, 1], [1.0] * 4), config(adv_estimator=estimator))
    assert got.advantages_B.tolist() == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(("minus_baseline", "mask"), [(False, [1.0, 1.0, 1.0]), (True, [0.0, 1.0, 1.0])])
def test_a_lone_member_trains_only_where_no_group_is_its_baseline(minus_baseline: bool, mask: list[float]) -> None:
    estimator = block("grpo.adv_estimator", **REINFORCE | {"minus_baseline": minus_baseline})
    got, _ = add_advantages(*given([1.0, 0.0, 1.0], [0, 1, 1], [1.0] * 3), config(adv_estimator=estimator))
    assert got.sample_mask_B.tolist() == mask


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [float("nan"), float("nan")]])
def test_a_batch_that_says_nothing_gives_no_advantage(rewards: list[float]) -> None:
    mask = [0.0 if value != value else 1.0 for value in rewards]
    got, _ = add_advantages(
        *given(rewards, [0, 0], mask), config(adv_estimator=block("grpo.adv_estimator", **REINFORCE))
    )
    assert got.advantages_B.abs().max() == 0.0


def test_positive_examples_share_their_weight_by_tokens() -> None:
    # 9 tokens in the loss, 3 of them in the one rollout with a reward: its sum is weighed 9/3 and divided by 9 later.
    got, _ = add_advantages(*given([1.0, 0.0, -1.0], [0, 0, 0], [1.0] * 3), config(nll=0.1))
    assert got.nll_weight_B is not None
    assert got.nll_weight_B.tolist() == pytest.approx([0.3, 0.0, 0.0])
    assert add_advantages(*given([1.0, 0.0], [0, 0], [1.0] * 2), config())[0].nll_weight_B is None


def test_with_the_kl_in_the_reward_the_ranks_normalise_and_clip() -> None:
    """The driver does not know the KL: it hands on the rewards, and the advantages of flagged turns, clipped."""
    estimator = block("grpo.adv_estimator", **REINFORCE)
    batch, groups = given([90.0, 0.0, 60.0, 30.0], [0, 0, 1, 1], [1.0, 1.0, 1.0, 0.0])
    options = {"adv_estimator": estimator, "invalid_tool_call_advantage": -70.0}
    got, metrics = add_advantages(batch, groups, config(use_kl_in_reward=True, **options))
    assert got.advantages_B.tolist() == [90.0, 0.0, 60.0, 0.0]
    assert not any("advantage" in name for name in metrics)  # no token is trained with 90
    assert min(value for value in got.flag_advantages if value is not None) == -50.0
    without, _ = add_advantages(batch, groups, config(**options))
    assert without.advantages_B.abs().max() < 2.0


def policy_row(advantage: float, logprobs: list[float], reference: list[float], mask: list[float]) -> PolicyRow:
    values = (torch.tensor(own) for own in (mask, logprobs, reference))
    mask_S, own_S, start_S = values
    return PolicyRow(advantage=advantage, loss_mask_S=mask_S, logprobs_S=own_S, reference_logprobs_S=start_S)


def test_a_token_that_left_the_reference_has_a_lower_advantage_than_the_others_of_its_rollout() -> None:
    def kl(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return (reference - logprobs).square() / 2

    far = -1e4  # on a token that was not sampled: exp of it overflows
    rows = [
        policy_row(1.0, [0.0, far, -1.0, -1.0], [0.0, 0.0, -1.0, -3.0], [0.0, 0.0, 1.0, 1.0]),
        policy_row(0.0, [0.0, -2.0], [0.0, -2.0], [0.0, 1.0]),
        policy_row(0.0, [0.0], [0.0], [0.0]),  # a rollout without any token
    ]
    (first, second, empty), metrics = subtract_kl(rows, lambda own: own, kl=kl, weight=0.5, bounds=(-1.0, 1.0))
    values = torch.tensor([1.0, 1.0 - 0.5 * 2.0, 0.0])  # by hand: of the three tokens in the loss; the KL is 2 on one
    want = (values - values.mean()) / values.std(unbiased=False)
    assert torch.cat([first[2:], second[1:]]).tolist() == pytest.approx(want.clamp(-1.0, 1.0).tolist(), abs=1e-6)
    assert empty.isfinite().all() and first.isfinite().all()
    assert metrics["kl_in_reward"] == (2.0, 3.0)
    nothing, metrics = subtract_kl(rows[2:], lambda own: own, kl=kl, weight=0.5)
    assert nothing[0].isfinite().all() and metrics["kl_in_reward"] == (0.0, 0.0)
    assert subtract_kl([], lambda own: own, kl=kl, weight=0.5)[0] == []


def taught_row(logprobs: list[float], teacher: list[float] | None, mask: list[float]) -> PolicyRow:
    return PolicyRow(
        advantage=0.0,
        loss_mask_S=torch.tensor(mask),
        logprobs_S=torch.tensor(logprobs),
        teacher_logprobs_S=None if teacher is None else torch.tensor(teacher),
    )


def test_a_token_that_the_teacher_finds_likelier_has_an_advantage() -> None:
    rows = [
        taught_row([0.0, -1.0, -2.0, -5.0], [0.0, -3.0, -0.5, 0.0], [0.0, 1.0, 1.0, 0.0]),
        taught_row([0.0, -2.0], [0.0, -90.0], [0.0, 1.0]),
        taught_row([0.0, -2.0], None, [0.0, 1.0]),  # nobody was asked
        taught_row([0.0, -2.0], [0.0, -1.0], [0.0, 0.0]),  # out of the loss
    ]
    advantages, metrics = distil(rows, lambda own: own, bounds=(-50.0, 50.0))
    assert [own.tolist() for own in advantages] == [[0.0, -2.0, 1.5, 0.0], [0.0, -50.0], [0.0, 0.0], [0.0, 0.0]]
    assert metrics["teacher_reverse_kl"] == (2.0 - 1.5 + 88.0, 3.0)  # of all tokens, before the bounds
    assert (metrics["token_advantages_min"], metrics["token_advantages_max"]) == (-50.0, 1.5)


def test_the_gradient_by_the_advantages_is_that_of_the_reverse_kl() -> None:
    """Summed over a whole vocabulary, where the expectation over sampled tokens is exact."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(7, generator=generator, requires_grad=True), torch.randn(7, generator=generator)
    policy, taught = logits.log_softmax(0), teacher.log_softmax(0)
    [kl_gradient] = torch.autograd.grad((policy.exp() * (policy - taught)).sum(), logits, retain_graph=True)
    rows = [taught_row([0.0, float(policy[token])], [0.0, float(taught[token])], [0.0, 1.0]) for token in range(7)]
    advantages = torch.stack([own[1] for own in distil(rows, lambda own: own)[0]])
    [gradient] = torch.autograd.grad(-(policy.detach().exp() * advantages * policy).sum(), logits)
    assert torch.allclose(gradient, kl_gradient, atol=1e-6)


DISTILLATION, DPO = (
    {"adv_estimator": block("grpo.adv_estimator", name=name, minus_baseline=True)}
    for name in ("on_policy_distillation", "dpo")
)
WITHOUT_REWARDS = pytest.mark.parametrize(
    "options",
    [
        pytest.param(DISTILLATION, id="distillation"),
        pytest.param(DPO, id="dpo"),
        pytest.param({"freeze_trunk": True}, id="healing"),
    ],
)


@WITHOUT_REWARDS
def test_where_rewards_play_no_part_none_and_no_penalty_is_an_advantage(options: dict[str, Any]) -> None:
    """The penalty of a flagged turn is in units of advantages from rewards, not of a distance to a teacher."""
    turns = {0: (turn(2, prompt=1, is_invalid_tool_call=True, has_malformed_thinking=True),)}
    batch, groups = given([1.0, 0.0, 3.0, 0.0], [0, 0, 1, 1], [1.0, 1.0, 1.0, 0.0], turns)
    got, metrics = add_advantages(batch, groups, config(malformed_thinking_advantage=-7.0, **options))
    assert {value for row in expanded(got) for value in row} == {0.0}
    assert got.sample_mask_B.tolist() == [1.0, 1.0, 1.0, 0.0]  # nothing is compared: one of a group trains
    assert metrics["num_invalid_tool_calls"] == 1.0
    assert "num_penalized_turns" not in metrics
    assert not any("advantage" in name for name in metrics)  # they are not computed here


def test_every_estimator_has_a_row_in_the_table() -> None:
    names = get_args(get_type_hints(AdvEstimatorConfig)["name"])
    assert {*names, HEALING} == set(ALGORITHMS)
    for name in names:
        own = config(adv_estimator=block("grpo.adv_estimator", name=name, minus_baseline=True))
        assert algorithm_of(own) is ALGORITHMS[name]
        assert (ALGORITHMS[name].estimate is None) == (not rewards_teach(own)) == (not has_group_baseline(own))
    assert algorithm_of(config(freeze_trunk=True)) is ALGORITHMS[HEALING]
    assert ALGORITHMS[HEALING].estimate is None and not rewards_teach(config(freeze_trunk=True))
