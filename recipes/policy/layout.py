"""Which parallel layouts the policy can run, checked before any worker starts, and where a rank stands in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.errors import ConfigError, Problem

if TYPE_CHECKING:
    from recipes.config.tree import PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands in the grid."""

    data: int
    is_output: bool  # one rank per data-parallel replica returns results: last stage, first tensor rank


def check_layout(cfg: PolicyConfig, *, world_size: int) -> None:
    """Raise `ConfigError` with every reason why `world_size` ranks cannot run this configuration."""
    megatron = cfg.megatron_cfg
    where = "policy.megatron_cfg."
    problems = [
        Problem(
            where=f"{where}{key}",
            got=str(getattr(megatron, key)),
            expected="1",
            fix="use tensor or data parallelism instead; the policy does not build this kind yet",
        )
        for key in ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
        if getattr(megatron, key) != 1
    ]
    tensor = megatron.tensor_model_parallel_size
    if world_size % tensor:
        problems.append(
            Problem(
                where=f"{where}tensor_model_parallel_size",
                got=str(tensor),
                expected=f"a divisor of {world_size}, the number of policy ranks",
                fix="change it or the number of training devices",
            )
        )
    if cfg.precision not in ("float32", "bfloat16"):
        problems.append(
            Problem(
                where="policy.precision",
                got=cfg.precision,
                expected="float32 or bfloat16",
                fix="use float32 on a CPU, bfloat16 on GPUs",
            )
        )
    scheduler = megatron.scheduler
    if scheduler.lr_decay_style != "constant" and scheduler.lr_decay_iters is None:
        problems.append(
            Problem(
                where=f"{where}scheduler.lr_decay_iters",
                got="null",
                expected=f"a number of steps for lr_decay_style {scheduler.lr_decay_style}",
                fix="set it, or lr_decay_style: constant",
            )
        )
    if problems:
        raise ConfigError(problems)
