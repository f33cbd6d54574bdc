"""Packages that some keys need on the machines of the policy; the launching machine cannot know what is there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from recipes.errors import ConfigError, Problem

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig

_FUSED = "transformer_engine"


def check_packages(megatron: MegatronConfig) -> None:
    """Raise `ConfigError` with every key that asks for a package which is not installed here."""
    wanted = {
        "apply_rope_fusion": megatron.apply_rope_fusion,
        "moe_permute_fusion": megatron.moe_permute_fusion,
        "optimizer.use_precision_aware_optimizer": megatron.optimizer.use_precision_aware_optimizer,
    }
    problems = [
        Problem(
            where=f"policy.megatron_cfg.{key}",
            wrong=f"the package {_FUSED} is not installed where the policy runs",
            fix="set it to false, or use the GPU image",
        )
        for key, value in wanted.items()
        if value and find_spec(_FUSED) is None
    ]
    if problems:
        raise ConfigError(problems)
