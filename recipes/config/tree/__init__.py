"""The configuration as frozen dataclasses: one field per key of configs/grpo_base.yaml, same names, same nesting.

Each field states all that is known of its key, once: type, range, unit, what the native engine honours, and, below it,
the meaning. `make config-keys` writes configs/schema.json and the comments of configs/grpo_base.yaml from it. The
default of a key stands in that file and nowhere else. Objects are made by `recipes.config.load.require_valid`; they
are light to import and to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from recipes.config.tree.data import (
    CircuitBreakerConfig,
    DataConfig,
    EffortLevelsConfig,
    EnvConfig,
    NemoGymConfig,
    TrainDataConfig,
    ValidationDataConfig,
)
from recipes.config.tree.generation import (
    ColocatedConfig,
    GenerationConfig,
    GenerationResourcesConfig,
    ServingChatConfig,
    VllmConfig,
)
from recipes.config.tree.grpo import (
    AdvEstimatorConfig,
    AsyncGrpoConfig,
    GrpoConfig,
    LossConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from recipes.config.tree.marks import NoEffect, Text
from recipes.config.tree.policy import PolicyConfig, SequencePackingConfig, TokenizerConfig
from recipes.config.tree.run import CheckpointingConfig, ClusterConfig, DeadlinesConfig, LoggerConfig, WandbConfig
from recipes.config.tree.training import DdpConfig, Fp8Config, MegatronConfig, OptimizerConfig, SchedulerConfig

__all__ = [
    "AdvEstimatorConfig",
    "AsyncGrpoConfig",
    "CheckpointingConfig",
    "CircuitBreakerConfig",
    "ClusterConfig",
    "ColocatedConfig",
    "Config",
    "DataConfig",
    "DdpConfig",
    "DeadlinesConfig",
    "EffortLevelsConfig",
    "EnvConfig",
    "Fp8Config",
    "GenerationConfig",
    "GenerationResourcesConfig",
    "GrpoConfig",
    "LoggerConfig",
    "LossConfig",
    "MegatronConfig",
    "NemoGymConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "SchedulerConfig",
    "SequencePackingConfig",
    "ServingChatConfig",
    "TokenizerConfig",
    "TrainDataConfig",
    "ValidationDataConfig",
    "VllmConfig",
    "WandbConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One stage, fully resolved."""

    __pydantic_config__: ClassVar = {"use_attribute_docstrings": True}  # the text below a field is its meaning

    data: DataConfig
    sif_dir: Annotated[Text | None, NoEffect("until agents on repositories are built: they are refused by name")]
    """directory of the SWE tasks' images (.sif), set from SIF_DIR; null = no such tasks"""
    env: EnvConfig
    grpo: GrpoConfig
    loss_fn: LossConfig
    policy: PolicyConfig
    checkpointing: CheckpointingConfig
    logger: LoggerConfig
    cluster: ClusterConfig
    deadlines: DeadlinesConfig
