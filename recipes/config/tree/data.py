"""Rows and the environments that score them: blocks `data` and `env`.

What a run writes, where it runs and how long it waits: `checkpointing`, `logger`, `cluster`, `deadlines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen

from recipes.config.tree.marks import FurtherKeys, Like, Text, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingConfig:
    """What is saved, when, and what is kept."""

    enabled: bool
    """save checkpoints"""
    checkpoint_dir: Literal["checkpoints"]
    """directory of the checkpoints in a run; later stages and tools look for this name"""
    save_period: Annotated[int, Ge(1), Unit("steps")]
    """steps between checkpoints"""
    keep_top_k: Annotated[int | None, Ge(1), Unit("checkpoints")]
    """checkpoints kept besides the newest: the best by metric_name; null = all"""
    ft_keep_latest_k: Annotated[int | None, Ge(1), Unit("checkpoints")]
    """newest checkpoints kept besides the best, on the save period or not; null = 1"""
    metric_name: Annotated[str | None, Like(r"^(val|train):.+")]
    """metric that ranks checkpoints, val:NAME or train:NAME; null = the newest is best"""
    higher_is_better: bool
    """whether a higher value of metric_name is better"""
    checkpoint_must_save_by: Annotated[str | None, Like(r"^[0-9]{2}:[0-9]{2}:[0-9]{2}:[0-9]{2}$")]
    """save and stop after this long, DD:HH:MM:SS since the job started; null = no limit"""
    save_optimizer: bool
    """save optimizer state; without it a resume begins with a fresh optimizer and is not exact"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases run."""

    project: Text
    """project; the launcher sets it from WANDB_PROJ"""
    name: Text
    """name of the run; the launcher sets it from EXP_NAME"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    """What a run writes besides checkpoints."""

    num_val_samples_to_print: Annotated[int, Ge(0), Unit("rollouts")]
    """validation rollouts printed in full at each validation"""
    tensorboard_enabled: bool
    """write TensorBoard files"""
    wandb_enabled: bool
    """log to Weights & Biases"""
    prometheus_address: Annotated[str | None, Like(r"^([^:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$")]
    """HOST:PORT at which Prometheus reads the numbers of the last step, 127.0.0.1:8900 say; null = nowhere"""
    wandb: WandbConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Nodes that train and generate; judges come on top."""

    num_nodes: Annotated[int, Ge(1), Unit("nodes")]
    """nodes that train or generate"""
    gpus_per_node: Annotated[int, Ge(1), Unit("GPUs")]
    """accelerators per node; without CUDA one worker process each"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinesConfig:
    """How long each wait may last, in seconds, before the run ends with an error naming it."""

    placement: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for Ray to place all workers"""
    engine_start: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for an engine or a policy worker to load and answer"""
    generation: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for one generation request"""
    rollout: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for one rollout including its environment"""
    refit: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for one weight push"""
    train: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for one call of the policy"""
    checkpoint: Annotated[float, Gt(0), Unit("seconds")]
    """seconds to write or read a checkpoint"""
    progress: Annotated[float, Gt(0), Unit("seconds")]
    """seconds without a new group while a step waits for its groups, and for one validation"""
    shutdown: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for workers to stop before they are killed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDataConfig:
    """Training rows."""

    data_path: Text
    """JSONL file of training rows; the launcher sets it from TRAIN_PATH"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationDataConfig:
    """Held-out rows."""

    data_path: Text | None
    """JSONL file of validation rows, set from VAL_PATH; null = never validate"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Rows to train and validate on, in NeMo Gym's row format."""

    train: TrainDataConfig
    validation: ValidationDataConfig
    shuffle: bool
    """shuffle rows once per epoch with grpo.seed; false = file order, which the curriculum needs"""
    on_change: Literal["refuse", "restart", "keep_ledger"]
    """resume on other rows, order or seed: refuse; restart = from the first row; keep_ledger = only untrained rows"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortLevelsConfig:
    """Length shaping of prompts that ask for low effort; off unless low_weight > 0 and low_string set."""

    low_weight: Annotated[float, Ge(0), Unit("weight")]
    """weight of the bonus for a short answer; 0 = off"""
    low_penalty: Annotated[float, Ge(0), Unit("weight")]
    """weight of the penalty for an answer longer than low_ub"""
    low_ub: Annotated[int, Ge(1), Unit("tokens")]
    """answer length in tokens at which the bonus reaches 0"""
    low_string: str
    """text in the last user message that asks for low effort; "" = off"""
    low_is_bounded: bool
    """the penalty is at most low_weight * low_penalty; false = it grows with the length without end, as upstream"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoGymConfig:
    """Environment servers and judges; further keys are server instances, named as in NeMo Gym."""

    config_paths: tuple[Text, ...]
    """YAML files of server instances, relative to configs/, merged in order under this block"""
    num_gpu_nodes: Annotated[int, Ge(0), Unit("nodes")]
    """nodes for judge models, on top of cluster.num_nodes; on one machine, further worker processes of it"""
    invalid_tool_call_patterns: Annotated[tuple[Text, ...], MinLen(1)]
    """text that marks a turn as an unparsed tool call"""
    thinking_tags: Annotated[tuple[Text, ...], MinLen(1)]
    """text that marks a turn as malformed thinking"""
    effort_levels: EffortLevelsConfig
    instances: Annotated[Mapping[str, Any], FurtherKeys("server_instance")]
    """the further keys of the block: server instances by name"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreakerConfig:
    """When an environment is paused because its rollouts end without a verdict, and how it is tried again."""

    window_rollouts: Annotated[int, Ge(1), Unit("rollouts")]
    """rollouts of one environment over which the share without a verdict is taken"""
    max_no_verdict_share: Annotated[float, Ge(0), Le(1), Unit("share")]
    """share above which the environment is paused: its prompts wait, unconsumed; 1 = never"""
    probe_seconds: Annotated[float, Gt(0), Unit("seconds")]
    """time between two prompts that try a paused environment; a group with verdicts resumes it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """How rollouts are scored."""

    should_use_nemo_gym: Literal[True]
    """rows are NeMo Gym rows routed by agent_ref.name; the only kind there is"""
    should_mask_flagged_samples: bool
    """drop from the loss and its group's statistics a rollout whose environment set mask_sample"""
    circuit_breaker: CircuitBreakerConfig
    judge_probe: Literal["refuse", "warn", "off"]
    """before the first step judges score answers that are known: refuse = one that is wrong ends the run; warn; off"""
    judge_texts: Literal["published", "own"]
    """words that judges are asked in: published = the recipe's, which `make data` brings; own = ours, for tiny runs"""
    nemo_gym: NemoGymConfig
