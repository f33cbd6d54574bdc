"""What a run writes, where it runs and how long it waits: `checkpointing`, `logger`, `cluster`, `deadlines`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from recipes.config.tree.marks import Like, Text, Unit


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
    """seconds without a finished step before the watchdog ends the run"""
    shutdown: Annotated[float, Gt(0), Unit("seconds")]
    """seconds for workers to stop before they are killed"""
