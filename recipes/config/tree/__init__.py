"""The configuration as frozen dataclasses: one field per key of configs/grpo_base.yaml, same names, same nesting.

Each field states all that is known of its key, once: type, range, unit, what the native engine honours, and, below it,
the meaning. `make config-keys` writes configs/schema.json and the comments of configs/grpo_base.yaml from it. The
default of a key stands in that file and nowhere else. Objects are made by `build` of checked values; they
are light to import and to pickle.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from recipes.config.tree.data import (
    CheckpointingConfig,
    CircuitBreakerConfig,
    ClusterConfig,
    DataConfig,
    DeadlinesConfig,
    EffortLevelsConfig,
    EnvConfig,
    LoggerConfig,
    NemoGymConfig,
    TrainDataConfig,
    ValidationDataConfig,
    WandbConfig,
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
    DpoConfig,
    GrpoConfig,
    LossConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from recipes.config.tree.marks import Text
from recipes.config.tree.training import (
    DdpConfig,
    Fp8Config,
    MegatronConfig,
    OptimizerConfig,
    PeftConfig,
    PolicyConfig,
    SchedulerConfig,
    SequencePackingConfig,
    TokenizerConfig,
)

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
    "DpoConfig",
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
    "PeftConfig",
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
    "build",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One stage, fully resolved."""

    __pydantic_config__: ClassVar = {"use_attribute_docstrings": True}  # the text below a field is its meaning

    data: DataConfig
    sif_dir: Text | None
    """directory of the SWE tasks' images (.sif), set from SIF_DIR; null = no such tasks"""
    env: EnvConfig
    grpo: GrpoConfig
    loss_fn: LossConfig
    dpo: DpoConfig
    policy: PolicyConfig
    checkpointing: CheckpointingConfig
    logger: LoggerConfig
    cluster: ClusterConfig
    deadlines: DeadlinesConfig


def build(cls: Any, data: Mapping[str, Any]) -> Any:
    """Return the dataclass `cls` made from checked data; the further keys of env.nemo_gym become its `instances`."""
    hints = _hints(cls)
    values = {name: _convert(hint, data[name]) for name, hint in hints.items() if name in data}
    if cls is NemoGymConfig:
        values["instances"] = {name: value for name, value in data.items() if name not in hints}
    return cls(**values)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _convert(hint: Any, value: Any) -> Any:
    arguments = get_args(hint)
    if NoneType in arguments:
        return None if value is None else _convert(next(kind for kind in arguments if kind is not NoneType), value)
    if is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return tuple(value)
    if hint in (int, float):
        return hint(value)
    return copy.deepcopy(value)
