"""Which sequences enter the loss, and what is counted; the formulas are pinned by the golden vectors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.grpo.advantage import nll_weights
from recipes.grpo.loss import grpo_loss, mask_mismatched, untrained_loss
from recipes.types import LossInputs
from tests.configuration import block

CONFIG = block(
    "loss_fn",
    force_on_policy_ratio=True,
    disable_ppo_ratio=False,
    sequence_level_importance_ratios=False,
    use_cispo=False,
    ratio_clip_c=None,
    use_importance_sampling_correction=True,
    truncated_importance_sampling_type="tis",
    truncated_importance_sampling_ratio=5.0,
    truncated_importance_sampling_ratio_min=None,
    token_level_loss=True,
    reference_policy_kl_penalty=0.0,
    reference_policy_kl_type="k3",
    use_kl_in_reward=False,
)


def inputs_of(generation: list[list[float]], current: torch.Tensor) -> LossInputs:
    mask_BT = torch.tensor([[0.0, 1.0, 1.0]] * len(generation))
    return LossInputs(
        token_mask_BT=mask_BT,
        sample_mask_B=torch.ones(len(generation)),
        advantages_BT=torch.ones_like(mask_BT),
        rewards_B=torch.tensor([1.0] * len(generation), dtype=torch.float64),
        prev_logprobs_BT=current.detach(),
        generation_logprobs_BT=torch.tensor(generation) * mask_BT,
    )


def test_mismatch_is_measured_on_sampled_tokens_only() -> None:
    prev = torch.tensor([[-200.0, -0.5, -0.5], [-200.0, -0.5 - math.log(3.0), -0.5 - math.log(3.0)]])
    kept, metrics = mask_mismatched(inputs_of([[0.0, -0.5, -0.5]] * 2, prev), threshold=2.0)
    assert kept.sample_mask_B.tolist() == [1.0, 0.0]
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(3.0)
    assert metrics["masked_correct_pct"] == (1, 1)
    assert metrics["logprob_error_max"] == pytest.approx(math.log(3.0))


@pytest.mark.parametrize(("token_level", "count"), [(True, 2), (False, 1)])
def test_a_masked_sequence_leaves_the_loss_its_count_and_its_gradient(token_level: bool, count: int) -> None:
    current = torch.tensor([[-9.0, -0.5, -0.5], [-9.0, -2.5, -2.5]]).requires_grad_()
    config = options(token_level_loss=token_level)
    sums = grpo_loss(current, inputs_of([[0.0, -0.5, -0.5]] * 2, current), cfg=config, mismatch_threshold=2.0)
    (gradient,) = torch.autograd.grad(sums.loss, current)
    assert sums.count == count
    share = count / 2  # the two tokens of a sequence share its weight where sequences count
    assert gradient.tolist() == [[0.0, -share, -share], [0.0, 0.0, 0.0]]
    assert (sums.metrics["global_valid_seqs"], sums.metrics["global_valid_toks"]) == (1, 2)


def test_a_microbatch_without_a_predicted_token_adds_nothing() -> None:
    empty = torch.zeros(2, 0).requires_grad_()
    inputs = LossInputs(
        token_mask_BT=torch.zeros(2, 0),
        sample_mask_B=torch.zeros(2),
        advantages_BT=torch.zeros(2, 0),
        rewards_B=torch.full((2,), torch.nan, dtype=torch.float64),
        prev_logprobs_BT=empty.detach(),
        generation_logprobs_BT=torch.zeros(2, 0),
    )
    sums = grpo_loss(empty, inputs, cfg=CONFIG, mismatch_threshold=2.0)
    assert (sums.loss, sums.count) == (0, 0)
    assert sums.metrics["logprob_error_max"] == 0
    assert sums.metrics["probs_ratio_max"] == -torch.inf


def test_what_is_masked_already_is_in_no_statistic_of_the_mismatch() -> None:
    # Three sequences with mean ratios 3, 1.5 and 100; the last is masked already, and would have been correct.
    gaps = (math.log(3.0), math.log(1.5), math.log(100.0))
    prev = torch.tensor([[7.0, -0.5 - gap, -0.5 - gap] for gap in gaps])
    inputs = replace(inputs_of([[0.0, -0.5, -0.5]] * 3, prev), sample_mask_B=torch.tensor([1.0, 1.0, 0.0]))
    kept, metrics = mask_mismatched(inputs, threshold=2.0)
    assert kept.sample_mask_B.tolist() == [0.0, 1.0, 0.0]
    assert metrics["num_masked_seqs_by_logprob_error"] == 1
    assert metrics["masked_correct_pct"] == (1, 1)
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(3.0)
    assert metrics["min_seq_mult_prob_error"] == pytest.approx(1.5)
    assert metrics["max_seq_mult_prob_error_after_mask"] == pytest.approx(1.5)
    assert metrics["min_seq_mult_prob_error_after_mask"] == pytest.approx(1.5)
    assert metrics["logprob_error_max"] == pytest.approx(math.log(3.0))


def test_a_sequence_without_a_sampled_token_is_neither_masked_nor_counted() -> None:
    inputs = inputs_of([[0.0, -0.5, -0.5]] * 2, torch.full((2, 3), -0.5))
    inputs = replace(inputs, token_mask_BT=torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    kept, metrics = mask_mismatched(inputs, threshold=2.0)
    assert kept.sample_mask_B.tolist() == [1.0, 1.0]
    assert metrics["min_seq_mult_prob_error"] == 1.0
    assert metrics["logprob_error_max"] == 0.0


def test_an_error_at_the_threshold_is_kept() -> None:
    prev = torch.tensor([[0.0, -1.0, -1.0]])
    kept, _ = mask_mismatched(inputs_of([[0.0, -1.0, -1.0]], prev), threshold=1.0)
    assert kept.sample_mask_B.tolist() == [1.0]


def options(**values: Any) -> Any:
    return replace(CONFIG, **values)


def test_reinforce_has_the_gradient_of_the_log_probability() -> None:
    current = torch.tensor([[-9.0, -0.5, -0.7], [-9.0, -2.5, -0.1]]).requires_grad_()
    given = replace(
        inputs_of([[0.0, -0.5, -0.7], [0.0, -2.5, -0.1]], current), advantages_BT=torch.tensor([[2.0] * 3, [-1.0] * 3])
    )
    cfg = options(force_on_policy_ratio=False, disable_ppo_ratio=True, ratio_clip_min=0.2, ratio_clip_max=0.2)
    sums = grpo_loss(current, given, cfg=cfg, mismatch_threshold=None)
    (gradient,) = torch.autograd.grad(sums.loss, current)
    assert gradient.tolist() == [[0.0, -2.0, -2.0], [0.0, 1.0, 1.0]]
    assert sums.loss.item() == pytest.approx(2.0 * 1.2 - 2.6)  # -A times the log-probability, summed
    forced = grpo_loss(current, given, cfg=options(), mismatch_threshold=None)
    torch.testing.assert_close(torch.autograd.grad(forced.loss, current)[0], gradient)


def test_positive_examples_are_made_more_likely_by_their_mean_negative_log_likelihood() -> None:
    current = torch.tensor([[-9.0, -0.5, -0.7], [-9.0, -2.5, -0.1], [-9.0, -1.0, -3.0]]).requires_grad_()
    generation = [[0.0, -0.5, -0.7], [0.0, -2.5, -0.1], [0.0, -1.0, -3.0]]
    rewards = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    cfg = options(positive_example_nll_weight=0.25)
    given = replace(inputs_of(generation, current), advantages_BT=torch.zeros(3, 3), rewards_B=rewards)
    given = replace(given, nll_weight_B=nll_weights(rewards, given.token_mask_BT.sum(dim=1), cfg))
    sums = grpo_loss(current, given, cfg=cfg, mismatch_threshold=None)
    mean = (0.5 + 0.7 + 2.5 + 0.1) / 4  # of the four tokens with a reward
    loss = sums.loss / sums.count
    assert loss.item() == pytest.approx(0.25 * mean)
    (gradient,) = torch.autograd.grad(loss, current)
    assert gradient.tolist() == [[0.0, -0.0625, -0.0625], [0.0, -0.0625, -0.0625], [0.0, 0.0, 0.0]]
    total, count = sums.metrics["positive_nll_loss"]
    assert total / count == pytest.approx(mean)


def test_what_is_not_computed_is_no_metric() -> None:
    current = torch.tensor([[-9.0, -0.5, -0.7]]).requires_grad_()
    given = inputs_of([[0.0, -0.5, -0.9]], current)
    sums = grpo_loss(current, given, cfg=CONFIG, mismatch_threshold=None)
    assert "loss" in sums.metrics and not {"kl_penalty", "positive_nll_loss"} & sums.metrics.keys()
    untrained = untrained_loss(current, given, cfg=CONFIG, mismatch_threshold=None)
    assert not untrained.loss.requires_grad and untrained.count == sums.count
    of_policy = {"loss", "sampling_importance_ratio", "is_oob_ratio", "probs_ratio", "probs_ratio_clamped"}
    ends = {f"{name}_{end}" for name in ("probs_ratio", "probs_ratio_clamped") for end in ("min", "max")}
    assert sums.metrics.keys() - untrained.metrics.keys() == of_policy | ends
    assert all(sums.metrics[name] == untrained.metrics[name] for name in untrained.metrics)
    masked = untrained_loss(current, given, cfg=CONFIG, mismatch_threshold=1.01)
    assert masked.sample_mask_B.tolist() == [0.0]


def test_no_positive_example_adds_nothing() -> None:
    current = torch.tensor([[-9.0, -0.5, -0.7]]).requires_grad_()
    given = inputs_of([[0.0, -0.5, -0.7]], current)
    weights = nll_weights(torch.tensor([float("nan")]), torch.tensor([2.0]), options(positive_example_nll_weight=1.0))
    assert weights.tolist() == [0.0]
    sums = grpo_loss(current, replace(given, nll_weight_B=weights), cfg=CONFIG, mismatch_threshold=None)
    assert sums.loss.item() == pytest.approx(-2.0)
    assert sums.metrics["positive_nll_loss"] == (0.0, 0.0)


@pytest.mark.parametrize("reference", [-200.0, 0.0])
def test_what_was_not_sampled_is_no_nan_in_the_kl(reference: float) -> None:
    current = torch.tensor([[-300.0, -0.5, -0.7]]).requires_grad_()
    given = replace(
        inputs_of([[0.0, -0.5, -0.7]], current), reference_logprobs_BT=torch.tensor([[reference, -0.9, -0.7]])
    )
    cfg = options(
        reference_policy_kl_penalty=0.1,
        use_on_policy_kl_approximation=False,
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    sums = grpo_loss(current, given, cfg=cfg, mismatch_threshold=None)
    (gradient,) = torch.autograd.grad(sums.loss, current)
    total, count = sums.metrics["kl_penalty"]
    assert total / count == pytest.approx((math.exp(-0.4) - 1 + 0.4) / 2)
    assert gradient[0, 0] == 0.0
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("policy", "engine"), [(-120.0, -0.5), (-0.5, -120.0)])
@pytest.mark.parametrize("approximates", [True, False])
def test_a_sequence_that_the_mismatch_masks_is_no_nan_in_the_kl(
    policy: float, engine: float, approximates: bool
) -> None:
    current = torch.tensor([[-9.0, -0.5, -0.7], [-9.0, policy, -0.7]]).requires_grad_()
    given = replace(
        inputs_of([[0.0, -0.5, -0.7], [0.0, engine, -0.7]], current),
        advantages_BT=torch.zeros(2, 3),
        reference_logprobs_BT=torch.tensor([[-1.0, -0.9, -0.7], [-1.0, -0.9, -0.7]]),
    )
    cfg = options(
        reference_policy_kl_penalty=0.1,
        use_on_policy_kl_approximation=approximates,
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    sums = grpo_loss(current, given, cfg=cfg, mismatch_threshold=2.0)
    (gradient,) = torch.autograd.grad(sums.loss, current)
    assert sums.metrics["num_masked_seqs_by_logprob_error"] == 1
    assert (sums.loss / sums.count).item() == pytest.approx(0.1 * (math.exp(-0.4) - 1 + 0.4) / 2)
    assert gradient[1].tolist() == [0.0] * 3
    assert gradient.isfinite().all()
