"""The algorithm: blocks `grpo` and `loss_fn`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from recipes.config.tree.marks import Text, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncGrpoConfig:
    """How far generation may run ahead of training."""

    enabled: bool
    """generate while training; false is the same as max_trajectory_age_steps 0"""
    max_trajectory_age_steps: Annotated[int, Ge(0), Unit("steps")]
    """oldest weights trained on, in steps; 0 = synchronous"""
    max_generation_failures: Annotated[int, Ge(0), Unit("batches")]
    """consecutive failed batches of rollouts before the run ends"""
    num_rollout_workers: Annotated[int | None, Ge(1), Unit("processes")]
    """processes that render, decode, run agents and score, spread over all nodes; null = one per node"""
    in_flight_weight_updates: bool
    """push new weights while requests run; false = wait until they have ended"""
    recompute_kv_cache_after_weight_updates: bool
    """compute the KV cache of running requests again after a push; without effect where none run then"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScalingConfig:
    """Linear map of the reward from [source_min, source_max] to [target_min, target_max]."""

    enabled: bool
    """scale rewards"""
    source_min: Annotated[float, Unit("reward")]
    """reward that maps to target_min; lower ones are clamped"""
    source_max: Annotated[float, Unit("reward")]
    """reward that maps to target_max; higher ones are clamped"""
    target_min: Annotated[float, Unit("reward")]
    """scaled reward at source_min"""
    target_max: Annotated[float, Unit("reward")]
    """scaled reward at source_max"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShapingConfig:
    """Penalty for answers near or over the length limit (DAPO)."""

    enabled: bool
    """shape rewards by length"""
    overlong_buffer_length: Annotated[int, Ge(1), Unit("tokens")]
    """tokens before the limit over which the penalty grows"""
    overlong_buffer_penalty: Annotated[float, Ge(0), Unit("reward")]
    """penalty, in reward, at the limit"""
    max_response_length: Annotated[int, Ge(1), Unit("tokens")]
    """the length limit, in generated tokens"""
    stop_properly_penalty_coef: Annotated[float | None, Ge(0), Le(1), Unit("ratio")]
    """factor on the reward of truncated answers, in place of the length penalty; null = off"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvEstimatorConfig:
    """From rewards to advantages."""

    name: Literal["grpo", "reinforce_plus_plus", "on_policy_distillation", "dpo"]
    """relative to a group (grpo), the batch (reinforce_plus_plus), teachers (on_policy_distillation); or pairs (dpo)"""
    normalize_rewards: bool
    """grpo: divide by the standard deviation of the group's rewards"""
    use_leave_one_out_baseline: bool
    """grpo: baseline = mean of the group's other rewards; false = mean of all"""
    minus_baseline: bool
    """reinforce_plus_plus: subtract the mean of the group's rewards before the batch is normalised"""
    teachers: Mapping[str, Text]
    """on_policy_distillation: agent of a row, or default for all others -> model server that teaches it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """The algorithm: batch shape, schedule, rollouts, rewards, advantages, validation."""

    num_prompts_per_step: Annotated[int, Ge(1), Unit("prompts")]
    """prompts (groups) in one step: P"""
    num_generations_per_prompt: Annotated[int, Ge(1), Unit("rollouts")]
    """rollouts of one prompt, the group size: G"""
    max_num_steps: Annotated[int, Ge(1), Unit("steps")]
    """stop after this many steps; the last one always saves"""
    max_num_epochs: Annotated[int, Ge(1), Unit("epochs")]
    """stop after this many passes over the training rows"""
    seed: Annotated[int, Ge(0), Le(2**31 - 1), Unit("seed")]  # NumPy, which vLLM seeds, takes 32 bits
    """seed of data order, sampling and initialisation"""
    async_grpo: AsyncGrpoConfig
    use_dynamic_sampling: bool
    """replace each group whose rewards are all equal by another prompt, until P groups differ (DAPO)"""
    dynamic_sampling_max_gen_batches: Annotated[int, Ge(1), Unit("batches")]
    """batches of P * batch_multiplier prompts generated for one step under dynamic sampling before it is an error"""
    batch_multiplier: Annotated[float, Ge(1), Unit("ratio")]
    """prompts generated at once per prompt trained under dynamic sampling, so that fewer are waited for"""
    reward_scaling: RewardScalingConfig
    reward_shaping: RewardShapingConfig
    overlong_filtering: bool
    """drop truncated rollouts from the loss and their group's statistics"""
    seq_logprob_error_threshold: Annotated[float | None, Ge(1), Unit("ratio")]
    """drop a rollout whose mean exp(abs(engine - trainer log-prob)) exceeds this; null = off"""
    parity_error_threshold: Annotated[float | None, Ge(1), Unit("ratio")]
    """refuse to start when engine and trainer differ by more than this on a prompt, in the same mean; null = off"""
    adv_estimator: AdvEstimatorConfig
    invalid_tool_call_advantage: Annotated[float | None, Unit("advantage")]
    """advantage set on the tokens of a turn with an unparsed tool call, where rewards decide; null = off"""
    malformed_thinking_advantage: Annotated[float | None, Unit("advantage")]
    """advantage set on the tokens of a turn with malformed thinking tags, where rewards decide; null = off"""
    advantage_clip_low: Annotated[float | None, Le(0), Unit("advantage")]
    """lowest advantage, applied last; null = no bound"""
    advantage_clip_high: Annotated[float | None, Ge(0), Unit("advantage")]
    """highest advantage, applied last; null = no bound"""
    val_period: Annotated[int, Ge(-1), Unit("steps")]
    """steps between validations; 0 or -1 = none"""
    val_start_at: Annotated[int, Ge(-1), Unit("steps")]
    """first step at which a periodic validation may run; -1 = any"""
    val_at_start: bool
    """validate before the first step of a fresh run"""
    val_at_end: bool
    """validate after the last step"""
    val_num_generations_per_prompt: Annotated[int, Ge(1), Unit("rollouts")]
    """sampled rollouts per validation row; more than 1 also gives pass_k"""
    val_greedy: bool
    """also decode each validation row once greedily"""
    stop_at_validation_metric: Text | None
    """validation metric that ends the run once it is high enough, as accuracy or AGENT/accuracy; null = none"""
    stop_at_validation_threshold: Annotated[float | None, Unit("the metric's")]
    """value of stop_at_validation_metric at which the run ends, saved and complete"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """Direct preference optimization, where grpo.adv_estimator.name is dpo: pairs of the policy's own answers."""

    reference_policy_kl_penalty: Annotated[float, Gt(0), Unit("weight")]
    """beta: how strongly the policy is held at the start weights"""
    preference_loss_weight: Annotated[float, Gt(0), Unit("weight")]
    """weight of -log sigmoid(beta * margin), the mean over pairs"""
    sft_loss_weight: Annotated[float, Ge(0), Unit("weight")]
    """weight of the negative log-likelihood of the preferred answers, the mean over pairs; 0 = off"""
    preference_average_log_probs: bool
    """in the margin divide the log-probability of an answer by its number of tokens"""
    sft_average_log_probs: bool
    """divide the negative log-likelihood of an answer by its number of tokens"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Clipped policy gradient with importance correction between engine and trainer."""

    force_on_policy_ratio: bool
    """one optimizer step per batch: ratio is exactly 1, clipping is inert"""
    disable_ppo_ratio: bool
    """REINFORCE: use the log-probability itself in place of the ratio"""
    sequence_level_importance_ratios: bool
    """one ratio per rollout, the geometric mean over its tokens (GSPO)"""
    ratio_clip_min: Annotated[float, Ge(0), Unit("ratio")]
    """lower clip: ratio >= 1 - this"""
    ratio_clip_max: Annotated[float, Ge(0), Unit("ratio")]
    """upper clip: ratio <= 1 + this"""
    ratio_clip_c: Annotated[float | None, Gt(1), Unit("ratio")]
    """dual clip: with A < 0 the loss is at most this times -A; null = off"""
    use_cispo: bool
    """CISPO: gradient through the log-probability, clipped ratio as a constant weight"""
    use_importance_sampling_correction: bool
    """weight each token by exp(trainer - engine log-prob); needed when weights may lag"""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None
    """how the importance weight is bounded: tis clamps it, icepop drops tokens, seq-mask-tis drops rollouts"""
    truncated_importance_sampling_ratio: Annotated[float | None, Gt(0), Unit("ratio")]
    """upper bound of the importance weight; null = unbounded"""
    truncated_importance_sampling_ratio_min: Annotated[float | None, Ge(0), Unit("ratio")]
    """lower bound of the importance weight; null = 0"""
    token_level_loss: bool
    """mean over all tokens of the batch; false = mean over rollouts of their token means"""
    reference_policy_kl_penalty: Annotated[float, Ge(0), Unit("weight")]
    """weight of the KL to the weights the stage started from; 0 = no reference model"""
    reference_policy_kl_type: Literal["k1", "k2", "k3"]
    """KL estimator"""
    kl_input_clamp_value: Annotated[float | None, Gt(0), Unit("nats")]
    """bound on the log-ratio that enters the KL, in nats; null = none"""
    kl_output_clamp_value: Annotated[float | None, Gt(0), Unit("nats")]
    """bound on the KL of one token, in nats; null = none"""
    use_on_policy_kl_approximation: bool
    """weight the KL by exp(trainer - engine log-prob)"""
    use_kl_in_reward: bool
    """subtract the KL, of the weights before the step, from the advantages in place of adding it to the loss"""
    positive_example_nll_weight: Annotated[float, Ge(0), Unit("weight")]
    """weight of the mean negative log-likelihood over the tokens of rollouts with reward > 0 (VAPO); 0 = off"""
