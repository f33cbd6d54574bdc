"""From rewards to advantages: relative to the group (GRPO), or to the batch (Reinforce++). Pure functions.

Statistics are computed in float64, in two passes, over valid members only: a rollout that has no verdict or is removed
from the loss enters no mean. Sources: DeepSeekMath (Shao et al. 2024) for GRPO, Ahmadian et al. 2024 for leave-one-out,
Hu et al. 2025 (arXiv 2501.03262) for Reinforce++.
Shape suffixes: G members of one group, P groups and B rollouts of the batch, F combinations of a turn's flags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.config.keys.derive import has_group_baseline
from recipes.grpo.loss import grpo_loss, sampled_kl, untrained_loss
from recipes.grpo.preference import pairs_of, prefer, preference_loss, unknown_tool_rate
from recipes.types import NUM_FLAGS, Group, LossSums, PolicyRow, ReferenceUse, RolloutHeader, TrainBatch, TurnFlags

if TYPE_CHECKING:
    from recipes.config.tree import AdvEstimatorConfig, Config, GrpoConfig, LossConfig

_EPS = 1e-6  # added to the deviation, as in the reference
# A deviation below this share of the group's reward range is rounding noise. Dividing by it would give one member whose
# reward differs from equal others an advantage of thousands, so the difference is then not divided.
_MIN_RELATIVE_STD = 1e-3
_MIN_VARIANCE = 1e-8  # of a batch's tokens in Reinforce++, as in the reference


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
    advantages_B: Tensor,
    tokens_B: Tensor,
    *,
    kl_sums_B: Tensor | None = None,
    kl_squares_B: Tensor | None = None,
    total: Callable[[Tensor], Tensor] = lambda own: own,
) -> Whitening:
    """Return the map that Reinforce++ applies to the advantage of every token in the loss.

    A rollout has the advantage `advantages_B` on each of its `tokens_B` tokens in the loss (0 when it is out of it).
    With the KL in the reward, a token has this minus its weighted KL, of which a rollout has the sum `kl_sums_B` and
    the sum of squares `kl_squares_B`. Where each rank has a part of the batch, `total` adds up over the ranks.
    """
    tokens_B, advantages_B = tokens_B.double(), advantages_B.double()
    kl_B = torch.zeros_like(tokens_B) if kl_sums_B is None else kl_sums_B.double()
    squares_B = torch.zeros_like(tokens_B) if kl_squares_B is None else kl_squares_B.double()
    count = total(tokens_B.sum()).clamp(min=1)
    mean = total((tokens_B * advantages_B - kl_B).sum()) / count
    gap_B = advantages_B - mean
    variance = total((tokens_B * gap_B.square() - 2 * gap_B * kl_B + squares_B).sum()) / count
    return Whitening(mean=mean.item(), scale=variance.clamp(min=_MIN_VARIANCE).rsqrt().item())


def subtract_kl(
    rows: Sequence[PolicyRow],
    total: Callable[[Tensor], Tensor],
    *,
    kl: Callable[[Tensor, Tensor], Tensor],
    weight: float,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[list[Tensor], dict[str, float | tuple[float, float]]]:
    """Return the advantages of each row's tokens with the KL to the reference policy in the reward, and its metrics.

    A token has the advantage of its rollout minus `weight` times its KL, which `kl` estimates from policy's and
    reference's log-probability. Reinforce++ then brings all tokens in the loss of the batch to mean 0 and variance 1
    (Hu et al. 2025); `bounds` clip the result. The KL is that of the weights before the step: it has no gradient.
    """
    estimates = []
    for row in rows:
        assert row.reference_logprobs_S is not None, "the KL to the reference needs one"
        # Tokens that were not sampled are out of the loss, and exp of their distance may overflow.
        reference_S = torch.where(row.loss_mask_S > 0, row.reference_logprobs_S, row.logprobs_S)
        estimates.append(kl(row.logprobs_S.double(), reference_S.double()) * row.loss_mask_S)

    def per_row(values: Sequence[Tensor | float]) -> Tensor:
        return torch.tensor([float(value) for value in values], dtype=torch.float64)

    kl_sums_B = per_row([kl_S.sum() for kl_S in estimates])
    squares_B = per_row([kl_S.square().sum() for kl_S in estimates])
    tokens_B = per_row([row.loss_mask_S.sum() for row in rows])
    batch = whitening(
        per_row([row.advantage for row in rows]),
        tokens_B,
        kl_sums_B=weight * kl_sums_B,
        kl_squares_B=weight**2 * squares_B,
        total=total,
    )
    advantages = [
        ((row.advantage - weight * kl_S - batch.mean) * batch.scale).clamp(*bounds).float()
        for row, kl_S in zip(rows, estimates, strict=True)
    ]
    measured: dict[str, float | tuple[float, float]] = {"kl_in_reward": (float(kl_sums_B.sum()), float(tokens_B.sum()))}
    return advantages, measured | _extremes(rows, advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """What an estimator of advantages reads, one entry per rollout."""

    rewards_B: Tensor
    group_B: Tensor
    valid_B: Tensor
    tokens_B: Tensor


def _relative_to_group(batch: Estimated, cfg: AdvEstimatorConfig, *, of_ranks: bool) -> Tensor:
    del of_ranks
    return estimate_advantages(
        batch.rewards_B,
        batch.group_B,
        batch.valid_B,
        normalize=cfg.normalize_rewards,
        leave_one_out=cfg.use_leave_one_out_baseline,
    )


def _relative_to_batch(batch: Estimated, cfg: AdvEstimatorConfig, *, of_ranks: bool) -> Tensor:
    """Reinforce++; with the KL in the reward it ends in `subtract_kl`, on the ranks that know the KL of each token."""
    if cfg.minus_baseline:
        advantages_B = subtract_group_mean(batch.rewards_B, batch.group_B, batch.valid_B)
    else:
        advantages_B = torch.where(batch.valid_B, batch.rewards_B.double(), 0.0)
    if of_ranks:
        return advantages_B
    whole = whitening(advantages_B, batch.tokens_B * batch.valid_B)
    return torch.where(batch.valid_B, (advantages_B - whole.mean) * whole.scale, 0.0)


def rollout_advantages(
    rewards_B: Tensor,
    group_B: Tensor,
    valid_B: Tensor,
    tokens_B: Tensor,
    cfg: AdvEstimatorConfig,
    *,
    of_ranks: bool = False,
) -> Tensor:
    """Return one advantage per rollout by the configured estimator, float64; 0 for invalid members.

    With `of_ranks` the ranks make one per token of it; they are all 0 where rewards play no part.
    """
    estimate = ALGORITHMS[cfg.name].estimate
    if estimate is None:
        return torch.zeros_like(rewards_B, dtype=torch.float64)
    batch = Estimated(rewards_B=rewards_B, group_B=group_B, valid_B=valid_B, tokens_B=tokens_B)
    return estimate(batch, cfg, of_ranks=of_ranks)


def distil(
    rows: Sequence[PolicyRow],
    total: Callable[[Tensor], Tensor],
    *,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[list[Tensor], dict[str, float | tuple[float, float]]]:
    """Return as the advantages of each row's tokens how much likelier the teacher finds them than the policy does.

    The mean of policy minus teacher over tokens that the policy has sampled is the reverse KL to the teacher, and its
    gradient is that of a policy gradient with teacher minus policy as the advantage. Both log-probabilities are those
    before the step. `bounds` clip the result. Where no teacher has answered, the advantage is 0.
    """
    del total
    advantages, gaps, counts = [], 0.0, 0.0
    for row in rows:
        if row.teacher_logprobs_S is None:
            advantages.append(torch.zeros_like(row.logprobs_S))
            continue
        gap_S = (row.teacher_logprobs_S - row.logprobs_S) * row.loss_mask_S
        gaps, counts = gaps - float(gap_S.double().sum()), counts + float(row.loss_mask_S.sum())
        advantages.append(gap_S.clamp(*bounds).float())
    return advantages, {"teacher_reverse_kl": (gaps, counts)} | _extremes(rows, advantages)


def _extremes(rows: Sequence[PolicyRow], advantages: Sequence[Tensor]) -> dict[str, float | tuple[float, float]]:
    """Return the smallest and the largest advantage of a token in the loss."""
    trained = [own_S[row.loss_mask_S > 0] for row, own_S in zip(rows, advantages, strict=True)]
    return {
        "token_advantages_min": min((float(own.min()) for own in trained if len(own)), default=math.inf),
        "token_advantages_max": max((float(own.max()) for own in trained if len(own)), default=-math.inf),
    }


def advantages_of_flags(
    *, invalid_tool_call: float | None, malformed_thinking: float | None
) -> tuple[float | None, ...]:
    """Return the advantage of a turn's tokens for each combination of `TurnFlags`, [F]; None is the rollout's own.

    With both flags the invalid tool call decides.
    """

    def of(flags: int) -> float | None:
        if flags & TurnFlags.INVALID_TOOL_CALL and invalid_tool_call is not None:
            return invalid_tool_call
        return malformed_thinking if flags & TurnFlags.MALFORMED_THINKING else None

    return tuple(of(flags) for flags in range(NUM_FLAGS))


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


def advantage_bounds(cfg: GrpoConfig) -> tuple[float, float]:
    """Return the bounds that every advantage is clipped to; infinite where there is none."""
    low, high = cfg.advantage_clip_low, cfg.advantage_clip_high
    return -math.inf if low is None else low, math.inf if high is None else high


def _to_start(config: Config) -> ReferenceUse | None:
    """Compare with the start weights where the KL to them has a weight, in the loss or in the reward."""
    loss = config.loss_fn
    if loss.reference_policy_kl_penalty == 0:
        return None
    if not loss.use_kl_in_reward:
        return ReferenceUse()
    return ReferenceUse(
        token_advantages=partial(
            subtract_kl,
            kl=partial(sampled_kl, cfg=loss),
            weight=loss.reference_policy_kl_penalty,
            bounds=advantage_bounds(config.grpo),
        )
    )


def _to_teacher(config: Config) -> ReferenceUse:
    return ReferenceUse(token_advantages=partial(distil, bounds=advantage_bounds(config.grpo)), keeps_start=False)


def _in_pairs(config: Config) -> ReferenceUse:
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    return ReferenceUse(token_advantages=partial(prefer, cfg=config.dpo, most_pairs=samples // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What an algorithm learns from."""

    estimate: Callable[..., Tensor] | None  # from rewards to one advantage per rollout; None: rewards play no part
    reference: Callable[[Config], ReferenceUse | None] = _to_start  # what the policy is compared with
    loss: Callable[..., LossSums] = grpo_loss
    pairs: Callable[[Sequence[Group], Tensor], Tensor] | None = None  # which rollouts are compared, two by two


HEALING = "healing"  # the name of no estimator: the policy stays as it is, and its heads have a loss of their own
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(estimate=_relative_to_group),
    "reinforce_plus_plus": Algorithm(estimate=_relative_to_batch),
    "on_policy_distillation": Algorithm(estimate=None, reference=_to_teacher),
    "dpo": Algorithm(estimate=None, reference=_in_pairs, loss=preference_loss, pairs=pairs_of),
    HEALING: Algorithm(estimate=None, reference=lambda config: None, loss=untrained_loss),
}


def algorithm_of(config: Config) -> Algorithm:
    """Return the algorithm of a configuration: its estimator's, or healing where only the heads are trained."""
    return ALGORITHMS[HEALING if config.policy.megatron_cfg.freeze_trunk else config.grpo.adv_estimator.name]


def add_advantages(batch: TrainBatch, groups: Sequence[Group], config: Config) -> tuple[TrainBatch, dict[str, float]]:
    """Fill in the advantages: estimate, overwrite flagged turns, clip; mask groups left with one valid member.

    Where rewards play no part, no turn has an advantage for its flags either: it is a penalty in units of advantages
    that rewards give. The sample mask is final after this, so the counts of what is trained on are reported here, and
    the factors of the positive-example loss are set.
    """
    cfg, algorithm = config.grpo, algorithm_of(config)
    valid_B = (batch.sample_mask_B > 0) & ~batch.rewards_B.isnan()
    if has_group_baseline(config):
        num_valid_P = torch.bincount(batch.group_B, weights=valid_B.double())
        valid_B &= num_valid_P[batch.group_B] >= 2
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = _turn_metrics(rollouts)
    tokens_B = torch.tensor([rollout.num_generated_tokens for rollout in rollouts]) * valid_B
    with_nll = config.loss_fn.positive_example_nll_weight > 0
    batch = replace(
        batch,
        sample_mask_B=batch.sample_mask_B * valid_B,
        nll_weight_B=nll_weights(batch.rewards_B, tokens_B, config.loss_fn) if with_nll else None,
        pair_B=None if algorithm.pairs is None else algorithm.pairs(groups, valid_B),
    )
    if algorithm.estimate is None:
        return batch, metrics
    reference = algorithm.reference(config)
    of_ranks = reference is not None and reference.token_advantages is not None  # they know them by token
    advantages_B = rollout_advantages(
        batch.rewards_B, batch.group_B, valid_B, tokens_B, cfg.adv_estimator, of_ranks=of_ranks
    )
    of_flags = advantages_of_flags(
        invalid_tool_call=cfg.invalid_tool_call_advantage, malformed_thinking=cfg.malformed_thinking_advantage
    )
    penalized = [flags for flags, own in enumerate(of_flags) if own is not None]
    metrics["num_penalized_turns"] = float(sum(one.turns_by_flags[flags] for one in rollouts for flags in penalized))
    low, high = advantage_bounds(cfg)
    final = replace(
        batch,
        advantages_B=advantages_B.float() if of_ranks else advantages_B.float().clamp(low, high),
        flag_advantages=tuple(None if value is None else min(max(value, low), high) for value in of_flags),
    )
    if not of_ranks:  # else a token's advantage is known to the ranks alone, which measure it
        zero_groups = [not advantages_B[batch.group_B == group].any() for group in range(len(groups))]
        metrics |= _token_metrics(advantages_B, of_flags, final, rollouts)
        metrics["num_zero_advantage_groups"] = float(sum(zero_groups))
    return final, metrics


def _token_metrics(
    advantages_B: Tensor, of_flags: Sequence[float | None], final: TrainBatch, rollouts: Sequence[RolloutHeader]
) -> dict[str, float]:
    """Return the statistics over the tokens in the loss, counted by rollout and flags of the turn.

    `advantages_B` and `of_flags` are those before the clip, `final` has those after it.
    """

    def by_flags(own_B: Tensor, values: Sequence[float | None]) -> Tensor:
        own = own_B.double()
        columns = [own if value is None else torch.full_like(own, value) for value in values]
        return torch.stack(columns, dim=1)

    tokens_BF = torch.tensor([rollout.generated_by_flags for rollout in rollouts], dtype=torch.float64)
    tokens_BF *= final.sample_mask_B[:, None] > 0
    raw_BF, clipped_BF = by_flags(advantages_B.float(), of_flags), by_flags(final.advantages_B, final.flag_advantages)
    count = tokens_BF.sum()
    if not count:
        return {f"advantages/{name}": 0.0 for name in ("mean", "max", "min", "clip_fraction")}
    trained = clipped_BF[tokens_BF > 0]
    return {
        "advantages/mean": float((clipped_BF * tokens_BF).sum() / count),
        "advantages/max": float(trained.max()),
        "advantages/min": float(trained.min()),
        "advantages/clip_fraction": float(((clipped_BF != raw_BF) * tokens_BF).sum() / count),
    }


def _turn_metrics(rollouts: Sequence[RolloutHeader]) -> dict[str, float]:
    """Count the turns of all rollouts, and those with a flag."""
    counts = [sum(rollout.turns_by_flags[flags] for rollout in rollouts) for flags in range(NUM_FLAGS)]
    invalid = sum(count for flags, count in enumerate(counts) if flags & TurnFlags.INVALID_TOOL_CALL)
    malformed = sum(count for flags, count in enumerate(counts) if flags & TurnFlags.MALFORMED_THINKING)
    return {
        "num_assistant_messages": float(sum(counts)),
        "num_invalid_tool_calls": float(invalid),
        "num_malformed_thinking": float(malformed),
        "invalid_tool_call_rate": invalid / max(sum(counts), 1),
        "malformed_thinking_rate": malformed / max(sum(counts), 1),
        **unknown_tool_rate(rollouts),
    }
