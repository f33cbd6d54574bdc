"""From the verdicts of a step's rollouts to one float64 reward per rollout. NaN marks "no verdict".

No failure is ever a reward: a rollout without a verdict of its environment or judge has NaN here. It is left out of its
group's statistics and of the loss, and is counted by its status.

Shaping changes rewards after the verdicts and before the group's statistics: effort, then scaling, then length. Each
step is off unless its block of the configuration says otherwise. Formulas: NeMo RL, `grpo.reward_scaling`,
`grpo.reward_shaping`, `env.nemo_gym.effort_levels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.types import Group, RolloutStatus

if TYPE_CHECKING:
    from recipes.config.tree import Config, EffortLevelsConfig, RewardScalingConfig, RewardShapingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """What shaping looks at, per rollout in the order of the rewards."""

    first_lengths_B: Tensor  # float64, tokens sampled in the first turn
    last_lengths_B: Tensor  # float64, tokens sampled in the last turn
    is_truncated_B: Tensor  # bool, the token budget ended the rollout
    asks_low_effort_B: Tensor  # bool, the last user message holds the marker


def collect_rewards(groups: Sequence[Group], config: Config) -> tuple[Tensor, dict[str, float]]:
    """Return rewards_B, shaped, float64, and the metrics of shaping; groups in order, rollouts in order within one."""
    rewards_B = verdicts(groups)
    effort, scaling, shaping = config.env.nemo_gym.effort_levels, config.grpo.reward_scaling, config.grpo.reward_shaping
    facts = answer_facts(groups, marker=effort.low_string)
    metrics: dict[str, float] = {}
    if is_on(effort):
        rewards_B, metrics = shape_effort(rewards_B, facts, effort)
    if scaling.enabled:
        rewards_B = scale(rewards_B, scaling)
    if shaping.enabled:
        metrics["unshaped_reward"] = float(rewards_B.nanmean())
        rewards_B = shape_length(rewards_B, facts, shaping)
    return rewards_B, metrics


def verdicts(groups: Sequence[Group]) -> Tensor:
    """Return the rewards that the verifiers gave, [B] float64, NaN where there was no verdict."""
    rewards = [
        rollout.reward if rollout.is_valid and rollout.reward is not None else torch.nan
        for group in groups
        for rollout in group.rollouts
    ]
    return torch.tensor(rewards, dtype=torch.float64)


def answer_facts(groups: Sequence[Group], *, marker: str) -> AnswerFacts:
    """Return lengths and marks of a step's rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    marked = [bool(marker) and marker in group.prompt_text for group in groups for _ in group.rollouts]
    return AnswerFacts(
        first_lengths_B=torch.tensor([rollout.first_answer_tokens for rollout in rollouts], dtype=torch.float64),
        last_lengths_B=torch.tensor([rollout.last_answer_tokens for rollout in rollouts], dtype=torch.float64),
        is_truncated_B=torch.tensor([rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts]),
        asks_low_effort_B=torch.tensor(marked, dtype=torch.bool),
    )


def is_on(effort: EffortLevelsConfig) -> bool:
    """Whether answers to marked prompts are shaped."""
    return effort.low_weight > 0 and bool(effort.low_string)


def shape_effort(rewards_B: Tensor, facts: AnswerFacts, effort: EffortLevelsConfig) -> tuple[Tensor, dict[str, float]]:
    """Reward short answers to marked prompts and penalise long ones; return rewards_B and metrics.

    With L the tokens of the last turn: q = min(1, low_weight * (1 - L / low_ub)) and
    reward = R + R * max(q, 0) + low_penalty * min(q, 0): a wrong answer (R = 0) earns nothing for being short.
    With `low_is_bounded`, q is at least -low_weight: an answer of twice `low_ub` tokens and one of thirty times lose
    the same, and no wrong answer falls below -low_weight * low_penalty.
    """
    q_B = (effort.low_weight * (1 - facts.last_lengths_B / effort.low_ub)).clamp(max=1.0)
    if effort.low_is_bounded:
        q_B = q_B.clamp(min=-effort.low_weight)
    shaped_B = rewards_B + rewards_B * q_B.clamp(min=0) + effort.low_penalty * q_B.clamp(max=0)
    low_B, lengths_B = facts.asks_low_effort_B, facts.last_lengths_B
    shaped_B = torch.where(low_B, shaped_B, rewards_B)
    metrics = {}
    if low_B.any():
        metrics = {
            "mean_length_reward_low": float(q_B[low_B].mean()),
            "mean_reward_low": float(shaped_B[low_B].nanmean()),
            "mean_length_low": float(lengths_B[low_B].mean()),
            "median_length_low": float(lengths_B[low_B].median()),
        }
    if not low_B.all():
        metrics |= {
            "mean_length_high": float(lengths_B[~low_B].mean()),
            "median_length_high": float(lengths_B[~low_B].median()),
        }
    return shaped_B, metrics


def scale(rewards_B: Tensor, scaling: RewardScalingConfig) -> Tensor:
    """Clamp rewards_B to [source_min, source_max] and map it linearly to [target_min, target_max]."""
    share_B = (rewards_B.clamp(scaling.source_min, scaling.source_max) - scaling.source_min) / (
        scaling.source_max - scaling.source_min
    )
    return scaling.target_min + share_B * (scaling.target_max - scaling.target_min)


def shape_length(rewards_B: Tensor, facts: AnswerFacts, shaping: RewardShapingConfig) -> Tensor:
    """Return rewards_B with a penalty for answers that are cut off or close to the length limit.

    With `stop_properly_penalty_coef` c, truncated answers keep c times their reward and nothing else changes. Without
    it, the overlong penalty of DAPO (arXiv 2503.14476): over the last `overlong_buffer_length` tokens before
    `max_response_length` the penalty grows to `overlong_buffer_penalty`, and beyond the limit at the same rate.
    """
    if shaping.stop_properly_penalty_coef is not None:
        return torch.where(facts.is_truncated_B, rewards_B * shaping.stop_properly_penalty_coef, rewards_B)
    start = shaping.max_response_length - shaping.overlong_buffer_length
    over_B = (facts.first_lengths_B - start) / shaping.overlong_buffer_length
    return rewards_B - over_B.clamp(min=0) * shaping.overlong_buffer_penalty
