"""From rewards to advantages: relative to the group (GRPO), or to the batch (Reinforce++). Pure functions.

Statistics are computed in float64, in two passes, over valid members only: a rollout that has no verdict or is removed
from the loss enters no mean. Sources: DeepSeekMath (Shao et al. 2024) for GRPO, Ahmadian et al. 2024 for leave-one-out,
Hu et al. 2025 (arXiv 2501.03262) for Reinforce++.
Shape suffixes: G members of one group, B rollouts of the batch, S padded tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.types import TrainBatch, TurnSpan

if TYPE_CHECKING:
    from recipes.config.tree import AdvEstimatorConfig, Config, LossConfig

_EPS = 1e-6  # added to the deviation, as in the reference
# A deviation below this share of the group's reward range is rounding noise. Dividing by it would give one member whose
# reward differs from equal others an advantage of thousands, so the difference is then not divided.
_MIN_RELATIVE_STD = 1e-3
_MIN_VARIANCE = 1e-8  # of a batch's tokens in Reinforce++, as in the reference

REINFORCE = "reinforce_plus_plus"


def group_baseline(rewards_G: Tensor, valid_G: Tensor, *, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """Return, per member, the mean and the unbiased deviation of the rewards it is compared with.

    With `leave_one_out` these are the rewards of the other valid members, else of all valid members. A member that is
    alone is its own baseline. The deviation is 0 when fewer than two rewards are compared. Invalid members get 0 and 0.
    """
    size = rewards_G.shape[0]
    compared_GG = valid_G.double().expand(size, size).clone()
    if leave_one_out:
        compared_GG.fill_diagonal_(0.0)
    rewards_G = torch.where(valid_G, rewards_G, 0.0)
    count_G = compared_GG.sum(dim=1)
    mean_G = (compared_GG * rewards_G).sum(dim=1) / count_G.clamp(min=1)
    squares_G = (compared_GG * (rewards_G[None, :] - mean_G[:, None]).square()).sum(dim=1)
    std_G = torch.where(count_G > 1, (squares_G / (count_G - 1).clamp(min=1)).sqrt(), 0.0)
    baseline_G = torch.where(count_G > 0, mean_G, rewards_G)
    return baseline_G * valid_G, std_G * valid_G


def estimate_advantages(
    rewards_B: Tensor, group_B: Tensor, valid_B: Tensor, *, normalize: bool, leave_one_out: bool
) -> Tensor:
    """Return one advantage per rollout, float64; 0 for invalid members.

    `group_B` holds group numbers: groups are told apart by identity, never by comparing prompts.
    With `normalize`, A = (r - baseline) / (std + 1e-6), unless the deviation is below a floor relative to the
    group's reward range: then A = r - baseline.
    """
    advantages_B = torch.zeros_like(rewards_B, dtype=torch.float64)
    for group in sorted(set(group_B.tolist())):
        members = group_B == group
        rewards_G, valid_G = rewards_B[members].double(), valid_B[members]
        if not valid_G.any():
            continue
        baseline_G, std_G = group_baseline(rewards_G, valid_G, leave_one_out=leave_one_out)
        difference_G = torch.where(valid_G, rewards_G - baseline_G, 0.0)
        if normalize:
            spread = rewards_G[valid_G].max() - rewards_G[valid_G].min()
            meaningful_G = std_G > _MIN_RELATIVE_STD * spread
            difference_G = torch.where(meaningful_G, difference_G / (std_G + _EPS), difference_G)
        advantages_B[members] = difference_G
    return advantages_B


@dataclass(frozen=True, slots=True, kw_only=True)
class Whitening:
    """A linear map to mean 0 and variance 1 over the tokens of a batch: (value - mean) * scale."""

    mean: float
    scale: float


def subtract_group_mean(rewards_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """Return each reward minus the mean of its group's valid members, float64; 0 for invalid members."""
    return estimate_advantages(rewards_B, group_B, valid_B, normalize=False, leave_one_out=False)


def whitening(
    advantages_B: Tensor, tokens_B: Tensor, *, kl_sums_B: Tensor | None = None, kl_squares_B: Tensor | None = None
) -> Whitening:
    """Return the map that Reinforce++ applies to the advantage of every token in the loss.

    A rollout has the advantage `advantages_B` on each of its `tokens_B` tokens in the loss (0 when it is out of it).
    With the KL in the reward, a token has this minus its weighted KL, of which a rollout has the sum `kl_sums_B` and
    the sum of squares `kl_squares_B`.
    """
    tokens_B, advantages_B = tokens_B.double(), advantages_B.double()
    kl_B = torch.zeros_like(tokens_B) if kl_sums_B is None else kl_sums_B.double()
    squares_B = torch.zeros_like(tokens_B) if kl_squares_B is None else kl_squares_B.double()
    count = tokens_B.sum().clamp(min=1)
    mean = (tokens_B * advantages_B - kl_B).sum() / count
    gap_B = advantages_B - mean
    variance = (tokens_B * gap_B.square() - 2 * gap_B * kl_B + squares_B).sum() / count
    return Whitening(mean=mean.item(), scale=variance.clamp(min=_MIN_VARIANCE).rsqrt().item())


def rollout_advantages(
    rewards_B: Tensor, group_B: Tensor, valid_B: Tensor, tokens_B: Tensor, cfg: AdvEstimatorConfig
) -> Tensor:
    """Return one advantage per rollout by the configured estimator, float64; 0 for invalid members."""
    if cfg.name != REINFORCE:
        return estimate_advantages(
            rewards_B,
            group_B,
            valid_B,
            normalize=cfg.normalize_rewards,
            leave_one_out=cfg.use_leave_one_out_baseline,
        )
    if cfg.minus_baseline:
        advantages_B = subtract_group_mean(rewards_B, group_B, valid_B)
    else:
        advantages_B = torch.where(valid_B, rewards_B.double(), 0.0)
    batch = whitening(advantages_B, tokens_B * valid_B)
    return torch.where(valid_B, (advantages_B - batch.mean) * batch.scale, 0.0)


def overwrite_flagged_turns(
    advantages_BS: Tensor,
    spans: Sequence[TurnSpan],
    *,
    invalid_tool_call: float | None,
    malformed_thinking: float | None,
) -> None:
    """Set in place the advantage of the flagged turns' tokens; with both flags the invalid tool call decides."""
    for span in spans:
        if span.is_invalid_tool_call and invalid_tool_call is not None:
            advantages_BS[span.row, span.start : span.end] = invalid_tool_call
        elif span.has_malformed_thinking and malformed_thinking is not None:
            advantages_BS[span.row, span.start : span.end] = malformed_thinking


def nll_weights(rewards_B: Tensor, tokens_B: Tensor, cfg: LossConfig) -> Tensor:
    """Return, per rollout of the whole batch, the factor on the summed negative log-likelihood of its tokens, [B].

    `tokens_B` counts the tokens in the loss, 0 for rollouts that are out of it. VAPO (arXiv 2504.05118) adds to the
    loss `positive_example_nll_weight` times the mean over the tokens of all rollouts with reward > 0. The sums of a
    batch are divided by its count at the end, so the factor holds this count over the number of those tokens. The
    mismatch test may take out further rollouts later: it then changes both numbers, and the factor stays.
    """
    positive_B = (rewards_B > 0) & (tokens_B > 0)
    count = tokens_B.sum() if cfg.token_level_loss else (tokens_B > 0).sum()
    scale = count / tokens_B[positive_B].sum().clamp(min=1)
    return torch.where(positive_B, cfg.positive_example_nll_weight * scale, 0.0).float()


def has_group_baseline(cfg: AdvEstimatorConfig) -> bool:
    """Whether a rollout is compared with the others of its group, so that one alone teaches nothing."""
    return cfg.name != REINFORCE or cfg.minus_baseline


def add_advantages(batch: TrainBatch, config: Config) -> tuple[TrainBatch, dict[str, float]]:
    """Fill in `advantages_BS`: estimate, overwrite flagged turns, clip; mask groups left with one valid member.

    The sample mask is final after this, so the counts of what is trained on are reported here, and the factors of the
    positive-example loss are set.
    """
    cfg = config.grpo
    valid_B = (batch.sample_mask_B > 0) & ~batch.rewards_B.isnan()
    if has_group_baseline(cfg.adv_estimator):
        partners_B = (batch.group_B[:, None] == batch.group_B[None, :]).double() @ valid_B.double()
        valid_B &= partners_B >= 2
    tokens_B = batch.token_mask_BS[:, 1:].sum(dim=1) * valid_B
    advantages_B = rollout_advantages(batch.rewards_B, batch.group_B, valid_B, tokens_B, cfg.adv_estimator)
    advantages_BS = advantages_B.float()[:, None].expand_as(batch.token_mask_BS).clone()
    overwrite_flagged_turns(
        advantages_BS,
        batch.turn_spans,
        invalid_tool_call=cfg.invalid_tool_call_advantage,
        malformed_thinking=cfg.malformed_thinking_advantage,
    )
    low, high = cfg.advantage_clip_low, cfg.advantage_clip_high  # None is no bound
    clipped_BS = advantages_BS.clamp(-math.inf if low is None else low, math.inf if high is None else high)
    trained = (batch.token_mask_BS * valid_B[:, None]) > 0
    values = clipped_BS[trained]
    num_turns = len(batch.turn_spans)
    num_invalid = sum(span.is_invalid_tool_call for span in batch.turn_spans)
    num_malformed = sum(span.has_malformed_thinking for span in batch.turn_spans)
    metrics = {
        "advantages/mean": values.mean().item() if values.numel() else 0.0,
        "advantages/max": values.max().item() if values.numel() else 0.0,
        "advantages/min": values.min().item() if values.numel() else 0.0,
        "advantages/clip_fraction": (clipped_BS != advantages_BS)[trained].double().mean().item()
        if values.numel()
        else 0.0,
        "num_assistant_messages": float(num_turns),
        "num_invalid_tool_calls": float(num_invalid),
        "num_malformed_thinking": float(num_malformed),
        "invalid_tool_call_rate": num_invalid / max(num_turns, 1),
        "malformed_thinking_rate": num_malformed / max(num_turns, 1),
        "num_zero_advantage_groups": float(
            sum(not advantages_B[batch.group_B == group].any() for group in set(batch.group_B.tolist()))
        ),
    }
    with_nll = config.loss_fn.positive_example_nll_weight > 0
    return (
        replace(
            batch,
            advantages_BS=clipped_BS,
            sample_mask_B=batch.sample_mask_B * valid_B,
            nll_weight_B=nll_weights(batch.rewards_B, tokens_B, config.loss_fn) if with_nll else None,
        ),
        metrics,
    )
