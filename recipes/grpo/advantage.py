"""Group-relative advantages: reward minus what the other answers to the same prompt earned. Pure functions.

Statistics are computed in float64, in two passes, over valid members only: a rollout that has no verdict or is removed
from the loss enters no mean. Sources: DeepSeekMath (Shao et al. 2024) for GRPO, Ahmadian et al. 2024 for leave-one-out.
Shape suffixes: G members of one group, B rollouts of the batch, S padded tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.types import TrainBatch, TurnSpan

if TYPE_CHECKING:
    from recipes.config.tree import GrpoConfig

_EPS = 1e-6  # added to the deviation, as in the reference
# A deviation below this share of the group's reward range is rounding noise. Dividing by it would give one member whose
# reward differs from equal others an advantage of thousands, so the difference is then not divided.
_MIN_RELATIVE_STD = 1e-3


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


def add_advantages(batch: TrainBatch, cfg: GrpoConfig) -> tuple[TrainBatch, dict[str, float]]:
    """Fill in `advantages_BS`: estimate, overwrite flagged turns, clip; mask groups left with one valid member.

    The sample mask is final after this, so the counts of what is trained on are reported here.
    """
    valid_B = (batch.sample_mask_B > 0) & ~batch.rewards_B.isnan()
    partners_B = (batch.group_B[:, None] == batch.group_B[None, :]).double() @ valid_B.double()
    valid_B &= partners_B >= 2
    advantages_B = estimate_advantages(
        batch.rewards_B,
        batch.group_B,
        valid_B,
        normalize=cfg.adv_estimator.normalize_rewards,
        leave_one_out=cfg.adv_estimator.use_leave_one_out_baseline,
    )
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
    return replace(batch, advantages_BS=clipped_BS, sample_mask_B=batch.sample_mask_B * valid_B), metrics
