"""Which parallel layouts the policy can run, checked before any worker starts, and where a rank stands in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.config.fits import fit_problems
from recipes.errors import ConfigError, Problem

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig, PolicyConfig

_WHERE = "policy.megatron_cfg."
_KINDS = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands in the grid."""

    data: int
    is_output: bool  # one rank per data-parallel replica returns results: last stage, first tensor and context rank
    exports: bool  # takes part in gathering the full weights


def check_layout(cfg: PolicyConfig, *, world_size: int) -> None:
    """Raise `ConfigError` with every reason why `world_size` ranks cannot run this configuration."""
    megatron = cfg.megatron_cfg
    tp, pp, cp, ep, etp = (getattr(megatron, f"{kind}_parallel_size") for kind in _KINDS)
    problems = []
    if world_size % (tp * pp * cp):
        problems.append(
            Problem(
                where=f"{_WHERE}{{tensor_model,pipeline_model,context}}_parallel_size",
                got=f"{tp} * {pp} * {cp} = {tp * pp * cp}",
                expected=f"a divisor of {world_size}, the number of policy ranks",
                fix="change one of them or the number of training devices",
            )
        )
    elif world_size // pp % (ep * etp):
        problems.append(
            Problem(
                where=f"{_WHERE}expert_model_parallel_size",
                got=f"{ep} (with expert_tensor_parallel_size {etp})",
                expected=f"a divisor of {world_size // pp}, the policy ranks of a pipeline stage",
                fix="lower it or change the number of training devices",
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
                where=f"{_WHERE}scheduler.lr_decay_iters",
                got="null",
                expected=f"a number of steps for lr_decay_style {scheduler.lr_decay_style}",
                fix="set it, or lr_decay_style: constant",
            )
        )
    if problems:
        raise ConfigError(problems)


def check_model_fits(sizes: Mapping[str, Any], vocab_size: int, megatron: MegatronConfig) -> None:
    """Raise `ConfigError` with every reason why a model cannot be divided as `megatron` asks.

    Args:
        sizes: the arguments of Megatron's `TransformerConfig` that describe the model.
    """
    problems = fit_problems(sizes, vocab_size, megatron)
    if problems:
        raise ConfigError(problems)
