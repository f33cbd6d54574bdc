"""The clipped policy-gradient loss of GRPO with importance correction. Pure functions of tensors.

Formulas: NeMo RL's clipped policy-gradient loss; the golden vectors recorded from it pin every option.
Every [B, T] array is aligned to *predicted* tokens: T = padded length - 1, entry t belongs to token t + 1.
Sums and the counts that they are divided by are returned side by side: both add up over microbatches and over
data-parallel ranks, and the division comes after the last of them.

Letters: c current, p before the step ("prev"), g generation engine, r reference log-probability of the token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.types import LossInputs, LossSums

if TYPE_CHECKING:
    from recipes.config.tree import LossConfig

_EPS = 1e-8  # keeps 0/0 at 0 when everything is masked

Mean = tuple[Tensor, Tensor]  # a sum and what it is divided by, scalars
Metrics = dict[str, Tensor | Mean]


def grpo_loss(
    logprobs_BT: Tensor, inputs: LossInputs, *, cfg: LossConfig, mismatch_threshold: float | None
) -> LossSums:
    """Return the sums of this microbatch, without the sequences that engine and policy disagree about."""
    inputs, mismatch = mask_mismatched(inputs, mismatch_threshold)
    mask_BT = inputs.token_mask_BT * inputs.sample_mask_B[:, None]
    prev_BT = logprobs_BT.detach() if cfg.force_on_policy_ratio else inputs.prev_logprobs_BT

    ratio_BT = policy_ratio(logprobs_BT, prev_BT, inputs.token_mask_BT, cfg)
    clamped_BT = ratio_BT
    # The forced ratio is 1 and REINFORCE has none: clipping would only cost the gradient.
    if not cfg.force_on_policy_ratio and not cfg.disable_ppo_ratio:
        clamped_BT = ratio_BT.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)
    surrogate_BT = clipped_surrogate(logprobs_BT, ratio_BT, clamped_BT, inputs.advantages_BT, cfg)

    weight_BT, out_of_bounds = importance_weights(prev_BT, inputs, cfg)
    applied_BT = weight_BT if cfg.use_importance_sampling_correction else torch.ones_like(surrogate_BT)
    actor, count = _mean(applied_BT * surrogate_BT, inputs, cfg)

    loss, terms = actor, Metrics()
    if cfg.reference_policy_kl_penalty > 0 and not cfg.use_kl_in_reward:
        penalty, _ = _mean(reference_kl(logprobs_BT, inputs, cfg), inputs, cfg)
        loss = loss + cfg.reference_policy_kl_penalty * penalty
        terms["kl_penalty"] = penalty.detach(), count
    if inputs.nll_weight_B is not None:
        loss = loss - (logprobs_BT * mask_BT * inputs.nll_weight_B[:, None]).sum()
        positive_BT = mask_BT * (inputs.nll_weight_B > 0)[:, None]
        terms["positive_nll_loss"] = _mean_tokens(-logprobs_BT.detach(), positive_BT)
    if out_of_bounds is not None:
        terms["is_oob_ratio"] = out_of_bounds

    with torch.no_grad():
        metrics = mismatch | _divergence_metrics(logprobs_BT, prev_BT, inputs, cfg) | _counts(inputs) | terms
        metrics |= _ratio_metrics(ratio_BT.detach(), clamped_BT.detach(), mask_BT)
        metrics |= {
            "loss": (loss.detach(), count),
            "sampling_importance_ratio": _mean_tokens(weight_BT.expand_as(mask_BT), mask_BT),
        }
    return LossSums(loss=loss, count=count, sample_mask_B=inputs.sample_mask_B, metrics=metrics)


@torch.no_grad()
def untrained_loss(
    logprobs_BT: Tensor, inputs: LossInputs, *, cfg: LossConfig, mismatch_threshold: float | None
) -> LossSums:
    """Return the sums of a microbatch by which the policy learns nothing: which sequences count, and how far apart
    engine and policy are. The loss is 0 and no metric: nothing computes one.
    """
    inputs, mismatch = mask_mismatched(inputs, mismatch_threshold)
    counts = _counts(inputs)
    metrics = mismatch | _divergence_metrics(logprobs_BT, logprobs_BT, inputs, cfg) | counts
    nothing, tokens = logprobs_BT.new_zeros(()), (inputs.token_mask_BT * inputs.sample_mask_B[:, None]).sum()
    return LossSums(loss=nothing, count=tokens, sample_mask_B=inputs.sample_mask_B, metrics=metrics)


@torch.no_grad()
def mask_mismatched(inputs: LossInputs, threshold: float | None) -> tuple[LossInputs, Metrics]:
    """Mask sequences whose mean per-token exp(|g - p|) exceeds `threshold`, and report this error either way.

    The threshold is `grpo.seq_logprob_error_threshold`. The test is two-sided: the engine's log-probability g may be
    too high or too low against the policy's p. Statistics are over sequences that have a token in the loss.
    """
    mask_BT = inputs.token_mask_BT * inputs.sample_mask_B[:, None]
    tokens_B = mask_BT.sum(dim=1)
    gap_BT = ((inputs.generation_logprobs_BT - inputs.prev_logprobs_BT) * mask_BT).abs()
    error_B = (gap_BT.exp() * mask_BT).sum(dim=1) / tokens_B.clamp(min=1)
    kept_B = torch.ones_like(error_B, dtype=torch.bool) if threshold is None else error_B <= threshold
    masked_B = (inputs.sample_mask_B > 0) & ~kept_B
    masked = masked_B.sum()
    metrics: Metrics = {
        **_error_metrics(error_B[tokens_B > 0], ""),
        **_error_metrics(error_B[(tokens_B > 0) & kept_B], "_after_mask"),
        "num_masked_seqs_by_logprob_error": masked,
        "masked_correct_pct": ((masked_B & (inputs.rewards_B == 1.0)).sum(), masked),
        "logprob_error_max": gap_BT.max() if gap_BT.numel() else gap_BT.new_zeros(()),
    }
    return replace(inputs, sample_mask_B=inputs.sample_mask_B * kept_B), metrics


def policy_ratio(logprobs_BT: Tensor, prev_BT: Tensor, token_mask_BT: Tensor, cfg: LossConfig) -> Tensor:
    """exp(c - p) per token, or per sequence (GSPO: exp of the mean over its tokens), broadcast to [B, T].

    With `disable_ppo_ratio` it is c itself: REINFORCE, whose gradient is that of the log-probability.
    """
    if cfg.disable_ppo_ratio:
        return logprobs_BT
    difference_BT = logprobs_BT - prev_BT
    if cfg.sequence_level_importance_ratios:
        tokens_B1 = token_mask_BT.sum(dim=1, keepdim=True)
        difference_BT = ((difference_BT * token_mask_BT).sum(dim=1, keepdim=True) / (tokens_B1 + _EPS)).expand_as(
            token_mask_BT
        )
    return difference_BT.exp()


def clipped_surrogate(
    logprobs_BT: Tensor, ratio_BT: Tensor, clamped_BT: Tensor, advantages_BT: Tensor, cfg: LossConfig
) -> Tensor:
    """PPO's pessimistic surrogate with the optional dual clip, or CISPO's clipped-weight REINFORCE."""
    if cfg.use_cispo:
        return -advantages_BT * clamped_BT.detach() * logprobs_BT
    surrogate_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clamped_BT)
    if cfg.ratio_clip_c is not None:
        capped_BT = torch.minimum(surrogate_BT, -advantages_BT * cfg.ratio_clip_c)
        surrogate_BT = torch.where(advantages_BT < 0, capped_BT, surrogate_BT)
    return surrogate_BT


def importance_weights(prev_BT: Tensor, inputs: LossInputs, cfg: LossConfig) -> tuple[Tensor, Mean | None]:
    """Return exp(p - g), truncated as configured, and the share of tokens or sequences out of bounds, if there are any.

    The weight is [B, T], or [B, 1] for sequence-level ratios. `tis` clamps it, `icepop` zeroes it outside
    [min, max], `seq-mask-tis` zeroes whole sequences by their geometric mean.
    """
    mask_BT = inputs.token_mask_BT * inputs.sample_mask_B[:, None]
    difference_BT = prev_BT - inputs.generation_logprobs_BT
    if cfg.sequence_level_importance_ratios:
        difference_BT = (difference_BT * mask_BT).sum(dim=1, keepdim=True)
    weight_BT = torch.nan_to_num(difference_BT.exp(), nan=0.0, posinf=0.0, neginf=0.0)

    high = cfg.truncated_importance_sampling_ratio
    low = cfg.truncated_importance_sampling_ratio_min
    kind = cfg.truncated_importance_sampling_type
    if high is None:
        return weight_BT, None
    if kind == "seq-mask-tis":
        tokens_B = inputs.token_mask_BT.sum(dim=1)
        mean_B = ((prev_BT - inputs.generation_logprobs_BT) * inputs.token_mask_BT).sum(dim=1) / (tokens_B + _EPS)
        inside_B = ((mean_B.exp() >= (low or 0.0)) & (mean_B.exp() <= high)).float()
        outside = ((1.0 - inside_B) * inputs.sample_mask_B).sum()
        return weight_BT * inside_B[:, None], (outside, inputs.sample_mask_B.sum())
    inside_BT = (weight_BT >= (low or 0.0)) & (weight_BT <= high)
    out = _mean_tokens((~inside_BT).float().expand_as(mask_BT), mask_BT)
    if kind == "icepop":
        return weight_BT * inside_BT, out
    return weight_BT.clamp(low or 0.0, high), out


def kl_estimate(
    logprobs: Tensor, reference: Tensor, kind: str, *, input_clamp: float | None = None, weights: Tensor | None = None
) -> Tensor:
    """Estimate KL(current || reference) per token from d = r - c: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d.

    Estimators: J. Schulman, "Approximating KL divergence" (2020). Where the input clamp bites, `weights` carries
    no gradient either.
    """
    d = reference - logprobs
    if input_clamp is not None:
        clamped = d.clamp(-input_clamp, input_clamp)
        if weights is not None:
            weights = torch.where(clamped == d, weights, weights.detach())
        d = clamped
    estimate = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.exp() - 1 - d}[kind]()
    return estimate if weights is None else estimate * weights


def sampled_kl(logprobs: Tensor, reference: Tensor, *, cfg: LossConfig) -> Tensor:
    """Return the estimate of the KL at each sampled token, within the configured bounds and without any weight."""
    estimate = kl_estimate(logprobs, reference, cfg.reference_policy_kl_type, input_clamp=cfg.kl_input_clamp_value)
    limit = cfg.kl_output_clamp_value
    return estimate if limit is None else estimate.clamp(-limit, limit)


def reference_kl(logprobs_BT: Tensor, inputs: LossInputs, cfg: LossConfig) -> Tensor:
    """Per-token KL to the reference policy, weighted for off-policy tokens; the weight carries gradient."""
    if inputs.reference_logprobs_BT is None:
        raise ValueError("loss_fn.reference_policy_kl_penalty > 0 needs reference log-probabilities")
    own_BT = logprobs_BT.detach()
    # On a token that is out of the loss they may be any distance apart: exp of it may overflow, and inf * 0 is NaN.
    is_trained_BT = inputs.token_mask_BT * inputs.sample_mask_B[:, None] > 0
    reference_BT = torch.where(is_trained_BT, inputs.reference_logprobs_BT, own_BT)
    base_BT = own_BT
    if cfg.use_on_policy_kl_approximation:
        base_BT = torch.where(is_trained_BT, inputs.generation_logprobs_BT, own_BT)
    kl_BT = kl_estimate(
        logprobs_BT,
        reference_BT,
        cfg.reference_policy_kl_type,
        input_clamp=cfg.kl_input_clamp_value,
        weights=(logprobs_BT - base_BT).exp(),
    )
    if cfg.kl_output_clamp_value is not None:
        kl_BT = kl_BT.clamp(-cfg.kl_output_clamp_value, cfg.kl_output_clamp_value)
    return kl_BT


def _counts(inputs: LossInputs) -> Metrics:
    return {
        "num_valid_samples": inputs.sample_mask_B.sum(),
        "global_valid_seqs": inputs.sample_mask_B.sum(),
        "global_valid_toks": (inputs.token_mask_BT * inputs.sample_mask_B[:, None]).sum(),
    }


def _mean_tokens(values_BT: Tensor, mask_BT: Tensor) -> Mean:
    return (values_BT * mask_BT).sum(), mask_BT.sum()


def _mean_sequences(values_BT: Tensor, inputs: LossInputs) -> Mean:
    tokens_B = inputs.token_mask_BT.sum(dim=1)
    mean_B = (values_BT * inputs.token_mask_BT).sum(dim=1) / (tokens_B + _EPS)
    if inputs.row_weight_B is not None:
        mean_B = mean_B * inputs.row_weight_B
    return (mean_B * inputs.sample_mask_B).sum(), inputs.sample_mask_B.sum()


def _mean(values_BT: Tensor, inputs: LossInputs, cfg: LossConfig) -> Mean:
    if cfg.token_level_loss:
        return _mean_tokens(values_BT, inputs.token_mask_BT * inputs.sample_mask_B[:, None])
    return _mean_sequences(values_BT, inputs)


def _smallest(values: Tensor) -> Tensor:
    return values.min() if values.numel() else values.new_tensor(torch.inf)


def _largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_tensor(-torch.inf)


def _error_metrics(error_n: Tensor, suffix: str) -> Metrics:
    name = f"seq_mult_prob_error{suffix}"
    return {
        f"max_{name}": _largest(error_n),
        f"mean_{name}": (error_n.sum(), error_n.new_tensor(error_n.numel())),
        f"min_{name}": _smallest(error_n),
    }


def _ratio_metrics(ratio_BT: Tensor, clamped_BT: Tensor, mask_BT: Tensor) -> Metrics:
    metrics: Metrics = {}
    for name, values_BT in (("probs_ratio", ratio_BT), ("probs_ratio_clamped", clamped_BT)):
        values = values_BT.expand_as(mask_BT)[mask_BT > 0]
        metrics[name] = _mean_tokens(values_BT.expand_as(mask_BT), mask_BT)
        metrics[f"{name}_min"] = _smallest(values)
        metrics[f"{name}_max"] = _largest(values)
    return metrics


def _divergence_metrics(logprobs_BT: Tensor, prev_BT: Tensor, inputs: LossInputs, cfg: LossConfig) -> Metrics:
    """How far the engine's probabilities are from the trainer's: multiplicative error, KL both ways, JS."""
    mask_BT = inputs.token_mask_BT * inputs.sample_mask_B[:, None]
    # Unsampled tokens have g = 0 and any p: exp of their gap may overflow, and inf * 0 is NaN.
    prev_BT = prev_BT * mask_BT
    g_BT = inputs.generation_logprobs_BT * mask_BT
    gap_BT = g_BT - prev_BT
    middle_BT = torch.logaddexp(prev_BT, g_BT) - torch.log(prev_BT.new_tensor(2.0))
    values = {
        "token_mult_prob_error": gap_BT.abs().exp(),
        "gen_kl_error": kl_estimate(g_BT, prev_BT, cfg.reference_policy_kl_type),
        "policy_kl_error": kl_estimate(prev_BT, g_BT, cfg.reference_policy_kl_type),
        "js_divergence_error": (_k3(prev_BT - middle_BT) + _k3(g_BT - middle_BT)) / 2,
        "approx_entropy": -(logprobs_BT - g_BT).exp() * logprobs_BT,
    }
    return {name: _mean_tokens(values_BT, mask_BT) for name, values_BT in values.items()}


def _k3(d: Tensor) -> Tensor:
    return d.exp() - 1 - d
