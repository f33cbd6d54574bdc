"""Direct preference optimization (DPO; Rafailov et al. 2023, arXiv 2305.18290) on pairs of the policy's own answers.

    loss = -log sigmoid(beta * (r(preferred) - r(other)))    r = log policy - log start, over the tokens of an answer

Of a prompt's rollouts one that calls a tool which its row does not offer is the other of a pair, and one that calls no
such tool the preferred: as in the report on Nemotron 3 Nano, appendix C. The reference policy has the start weights.

The gradient of the loss is that of a policy gradient in which every token of the preferred rollout has the advantage
beta * sigmoid(-beta * margin), and every token of the other one its negative; the margin is r(preferred) - r(other). So
the two may lie in any microbatch of any rank: before the step the ranks add up what each knows of the pairs. Keys and
metrics are NeMo RL's: `rewards_*_mean` are means of r, without beta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import softplus

from recipes.grpo.loss import untrained_loss
from recipes.types import Group, LossInputs, LossSums, PolicyRow, RolloutHeader

if TYPE_CHECKING:
    from recipes.config.tree import DpoConfig, LossConfig

PREFERRED, OTHER, PREFERRED_TOKENS, OTHER_TOKENS, PREFERRED_LOGPROBS = range(5)  # what is added up of each pair


def unknown_tool_rate(rollouts: Sequence[RolloutHeader], prefix: str = "") -> dict[str, float]:
    """Return the share of tool calls that name a tool which their row does not offer; nothing without any call."""
    calls, unknown = (sum(rollout.tool_calls[n] for rollout in rollouts) for n in (0, 1))
    return {f"{prefix}unknown_tool_rate": unknown / calls} if calls else {}


def pairs_of(groups: Sequence[Group], valid_B: Tensor) -> Tensor:
    """Return the pair of each rollout of a batch, int64: its number where it is preferred, minus it where it is not.

    Pairs are numbered from 1; a rollout without one has 0. The preferred of a group are taken in this order: calls of
    tools that are offered before answers without a call, then by reward.
    """
    pair_B = torch.zeros(len(valid_B), dtype=torch.int64)
    first = num_pairs = 0
    for group in groups:
        valid = [first + n for n in range(len(group.rollouts)) if valid_B[first + n]]
        of = {first + n: rollout for n, rollout in enumerate(group.rollouts)}
        wrong = [row for row in valid if of[row].tool_calls[1]]
        right = [row for row in valid if not of[row].tool_calls[1]]
        right.sort(key=lambda row: (not of[row].tool_calls[0], -(of[row].reward or 0.0)))
        for preferred, other in zip(right, wrong, strict=False):
            num_pairs += 1
            pair_B[preferred], pair_B[other] = num_pairs, -num_pairs
        first += len(group.rollouts)
    return pair_B


def prefer(
    rows: Sequence[PolicyRow], total: Callable[[Tensor], Tensor], *, cfg: DpoConfig, most_pairs: int
) -> tuple[list[Tensor], dict[str, float | tuple[float, float]]]:
    """Return the advantages of each row's tokens by which the preferred of each pair becomes likelier, and metrics.

    `preference_loss` divides by the number of tokens in the loss, and the loss of DPO is a mean over pairs: advantages
    hold the quotient of both. A pair of which no token of either side is in the loss is none.
    """
    own_KP = torch.zeros(PREFERRED_LOGPROBS + 1, most_pairs, dtype=torch.float64)
    for row in (row for row in rows if row.pair):
        assert row.reference_logprobs_S is not None, "a preference is measured against the start weights"
        place, is_other = abs(row.pair) - 1, int(row.pair < 0)
        trained_S = row.loss_mask_S > 0
        logprobs_S, reference_S = row.logprobs_S[trained_S].double(), row.reference_logprobs_S[trained_S].double()
        own_KP[PREFERRED + is_other, place] += (logprobs_S - reference_S).sum()
        own_KP[PREFERRED_TOKENS + is_other, place] += len(logprobs_S)
        if not is_other:
            own_KP[PREFERRED_LOGPROBS, place] += logprobs_S.sum()
    all_KP = total(own_KP)
    tokens = float(total(torch.tensor([float(row.loss_mask_S.sum()) for row in rows], dtype=torch.float64).sum()))

    whole_P = (all_KP[PREFERRED_TOKENS] > 0) & (all_KP[OTHER_TOKENS] > 0)
    num_pairs = int(whole_P.sum())
    ones_2P = torch.ones(2, most_pairs, dtype=torch.float64)
    lengths_2P = all_KP[[PREFERRED_TOKENS, OTHER_TOKENS]].clamp(min=1)
    over_2P = lengths_2P if cfg.preference_average_log_probs else ones_2P
    rewards_2P = all_KP[[PREFERRED, OTHER]] / over_2P
    margin_P = cfg.reference_policy_kl_penalty * (rewards_2P[0] - rewards_2P[1])
    pull_P = cfg.preference_loss_weight * cfg.reference_policy_kl_penalty * torch.sigmoid(-margin_P)
    learned_P = cfg.sft_loss_weight / (lengths_2P[0] if cfg.sft_average_log_probs else ones_2P[0])
    by_side_2P = torch.stack([pull_P / over_2P[0] + learned_P, -pull_P / over_2P[1]]) * whole_P
    by_side_2P *= tokens / max(num_pairs, 1)

    advantages = [
        row.loss_mask_S * float(by_side_2P[int(row.pair < 0), abs(row.pair) - 1] if row.pair else 0.0) for row in rows
    ]

    def mean(values_P: Tensor) -> tuple[float, float]:
        return float(values_P[whole_P].sum()), float(num_pairs)

    preference_P = softplus(-margin_P)
    sft_P = -all_KP[PREFERRED_LOGPROBS] / (lengths_2P[0] if cfg.sft_average_log_probs else ones_2P[0])
    metrics: dict[str, float | tuple[float, float]] = {"num_pairs": (float(num_pairs), 1.0)}
    if num_pairs:  # else there is nothing to measure
        metrics |= {
            "loss": mean(cfg.preference_loss_weight * preference_P + cfg.sft_loss_weight * sft_P),
            "preference_loss": mean(preference_P),
            "accuracy": mean((rewards_2P[0] > rewards_2P[1]).double()),
            "rewards_chosen_mean": mean(rewards_2P[0]),
            "rewards_rejected_mean": mean(rewards_2P[1]),
            **({"sft_loss": mean(sft_P)} if cfg.sft_loss_weight > 0 else {}),
        }
    return advantages, metrics


def preference_loss(
    logprobs_BT: Tensor, inputs: LossInputs, *, cfg: LossConfig, mismatch_threshold: float | None
) -> LossSums:
    """Return the sums of a microbatch whose gradient is that of DPO; its value is no loss, which `prefer` reports.

    No sequence is taken out because the engine disagrees: the engine's log-probabilities play no part.
    """
    del mismatch_threshold
    sums = untrained_loss(logprobs_BT, inputs, cfg=cfg, mismatch_threshold=None)
    mask_BT = inputs.token_mask_BT * inputs.sample_mask_B[:, None]
    return replace(sums, loss=-(inputs.advantages_BT * logprobs_BT * mask_BT).sum())
