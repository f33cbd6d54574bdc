"""The configuration as frozen dataclasses: one field per key of configs/grpo_base.yaml, same names, same nesting.

No defaults here: the base YAML holds them. Units and meaning stand in configs/schema.json and beside each key of
the base YAML. Made by `recipes.config.load.require_valid`; light to import and to pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.config.tree_policy import GenerationConfig as GenerationConfig
from recipes.config.tree_policy import MegatronConfig as MegatronConfig
from recipes.config.tree_policy import PolicyConfig as PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDataConfig:
    """Training rows."""

    data_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationDataConfig:
    """Held-out rows."""

    data_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Rows to train and validate on, in NeMo Gym's row format."""

    train: TrainDataConfig
    validation: ValidationDataConfig
    shuffle: bool
    on_change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortLevelsConfig:
    """Length shaping of prompts that ask for low effort; off unless low_weight > 0 and low_string set."""

    low_weight: float
    low_penalty: float
    low_ub: int
    low_string: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoGymConfig:
    """Environment servers and judges; further keys are server instances, named as in NeMo Gym."""

    config_paths: tuple[str, ...]
    num_gpu_nodes: int
    invalid_tool_call_patterns: tuple[str, ...]
    thinking_tags: tuple[str, ...]
    effort_levels: EffortLevelsConfig
    instances: Mapping[str, Any]  # the further keys of the block: server instances by name


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """How rollouts are scored."""

    should_use_nemo_gym: bool
    should_mask_flagged_samples: bool
    nemo_gym: NemoGymConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncGrpoConfig:
    """How far generation may run ahead of training."""

    enabled: bool
    max_trajectory_age_steps: int
    max_generation_failures: int
    in_flight_weight_updates: bool
    recompute_kv_cache_after_weight_updates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScalingConfig:
    """Linear map of the reward from [source_min, source_max] to [target_min, target_max]."""

    enabled: bool
    source_min: float
    source_max: float
    target_min: float
    target_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShapingConfig:
    """Penalty for answers near or over the length limit (DAPO)."""

    enabled: bool
    overlong_buffer_length: int
    overlong_buffer_penalty: float
    max_response_length: int
    stop_properly_penalty_coef: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvEstimatorConfig:
    """From rewards to advantages."""

    name: str
    normalize_rewards: bool
    use_leave_one_out_baseline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """The algorithm: batch shape, schedule, rollouts, rewards, advantages, validation."""

    num_prompts_per_step: int
    num_generations_per_prompt: int
    max_num_steps: int
    max_num_epochs: int
    seed: int
    async_grpo: AsyncGrpoConfig
    use_dynamic_sampling: bool
    dynamic_sampling_max_gen_batches: int
    batch_multiplier: float
    reward_scaling: RewardScalingConfig
    reward_shaping: RewardShapingConfig
    overlong_filtering: bool
    seq_logprob_error_threshold: float | None
    adv_estimator: AdvEstimatorConfig
    invalid_tool_call_advantage: float | None
    malformed_thinking_advantage: float | None
    advantage_clip_low: float | None
    advantage_clip_high: float | None
    val_period: int
    val_start_at: int
    val_at_start: bool
    val_at_end: bool
    val_num_generations_per_prompt: int
    val_greedy: bool
    stop_at_validation_metric: str | None
    stop_at_validation_threshold: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Clipped policy gradient with importance correction between engine and trainer."""

    force_on_policy_ratio: bool
    disable_ppo_ratio: bool
    sequence_level_importance_ratios: bool
    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    use_cispo: bool
    use_importance_sampling_correction: bool
    truncated_importance_sampling_type: str | None
    truncated_importance_sampling_ratio: float | None
    truncated_importance_sampling_ratio_min: float | None
    token_level_loss: bool
    reference_policy_kl_penalty: float
    reference_policy_kl_type: str
    kl_input_clamp_value: float | None
    kl_output_clamp_value: float | None
    use_on_policy_kl_approximation: bool
    use_kl_in_reward: bool
    positive_example_nll_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingConfig:
    """What is saved, when, and what is kept."""

    enabled: bool
    checkpoint_dir: str
    save_period: int
    keep_top_k: int | None
    metric_name: str | None
    higher_is_better: bool
    checkpoint_must_save_by: str | None
    save_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases run."""

    project: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    """What a run writes besides checkpoints."""

    num_val_samples_to_print: int
    tensorboard_enabled: bool
    wandb_enabled: bool
    wandb: WandbConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Nodes that train and generate; judges come on top."""

    num_nodes: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinesConfig:
    """How long each wait may last, in seconds, before the run ends with an error naming it."""

    placement: float
    engine_start: float
    generation: float
    rollout: float
    refit: float
    train: float
    checkpoint: float
    progress: float
    shutdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One stage, fully resolved."""

    data: DataConfig
    sif_dir: str | None
    env: EnvConfig
    grpo: GrpoConfig
    loss_fn: LossConfig
    policy: PolicyConfig
    checkpointing: CheckpointingConfig
    logger: LoggerConfig
    cluster: ClusterConfig
    deadlines: DeadlinesConfig
