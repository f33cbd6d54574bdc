"""Which saved optimizers a trainer can read: those whose parts have the names and the sizes of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import get_model_config

from recipes.errors import CheckpointError, Problem
from recipes.policy.step import Trainer

IN_PARTS, PER_PARAMETER = "dp_reshardable", "fully_reshardable"  # forms of a saved optimizer, by Megatron's names
_MEGATRON = "policy.megatron_cfg."
_KINDS = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
_MODEL_PARALLEL = tuple(f"{kind}_parallel_size" for kind in _KINDS)
_GROUPED = f"{_MEGATRON}moe_grouped_gemm"
_OF_EVERY_FORM = (
    "policy.precision",
    f"{_MEGATRON}freeze_moe_router",
    f"{_MEGATRON}optimizer.optimizer",
    f"{_MEGATRON}optimizer.use_distributed_optimizer",
)


def layout() -> dict[str, int]:
    """Sizes that decide which rank holds which part of the model and which random state."""
    return {
        "world_size": dist.get_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def optimizer_keys(trainer: Trainer) -> dict[str, Any]:
    """Return the values, by their keys, that decide under which names an optimizer is saved, and in which parts."""
    megatron = trainer.cfg.megatron_cfg
    ddp = megatron.distributed_data_parallel_config
    has_experts = bool(get_model_config(trainer.model).num_moe_experts)
    return {
        "policy.precision": trainer.cfg.precision,
        f"{_MEGATRON}freeze_moe_router": megatron.freeze_moe_router and has_experts,
        f"{_MEGATRON}optimizer.optimizer": megatron.optimizer.optimizer,
        f"{_MEGATRON}optimizer.use_distributed_optimizer": megatron.optimizer.use_distributed_optimizer,
        _GROUPED: megatron.moe_grouped_gemm and has_experts,  # it decides the order of the weights
        f"{_MEGATRON}num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
        f"{_MEGATRON}num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
        f"{_MEGATRON}distributed_data_parallel_config.overlap_grad_reduce": ddp.overlap_grad_reduce,
        f"{_MEGATRON}distributed_data_parallel_config.grad_reduce_in_fp32": ddp.grad_reduce_in_fp32,
    }


def require_same_heads(trainer: Trainer, saved: dict[str, Any], path: Path) -> None:
    """Refuse to begin or to end the training of multi-token heads within a run: the optimizer holds their moments."""
    now, then = trainer.cfg.megatron_cfg.mtp_num_layers > 0, saved.get("trains_heads", False)
    if saved["form"] is not None and now != then:
        problem = Problem(
            where="policy.megatron_cfg.mtp_num_layers",
            got=str(trainer.cfg.megatron_cfg.mtp_num_layers),
            expected=f"{'more than 0' if then else '0'}, as when {path} was saved: its optimizer has"
            f" {'' if then else 'no '}state of the heads",
            fix="resume with that value, or start a new run from the export of that step",
        )
        raise CheckpointError([problem])


def require_readable(trainer: Trainer, saved: dict[str, Any], path: Path) -> None:
    """Refuse to read an optimizer whose parts have other names or sizes than those of this trainer.

    Older versions of this recipe have not written all the values; what they have not is not compared.
    """
    if "optimizer_keys" not in saved:
        _require_whole_weights(path)
    sizes = {key: size for key, size in layout().items() if key in _MODEL_PARALLEL}
    now = {f"{_MEGATRON}{key}": size for key, size in sizes.items()} | optimizer_keys(trainer)
    then = {f"{_MEGATRON}{key}": saved["layout"].get(key, 1) for key in sizes}
    then |= {_GROUPED: False} | saved.get("optimizer_keys", {})
    problems = [
        Problem(
            where=key,
            got=_text(now[key]),
            expected=f"{_text(then[key])}, as when {path} was saved: the parts of its optimizer depend on it",
            fix="resume with that value"
            + (
                ", or start a new run from the export of that step"
                if key in _OF_EVERY_FORM
                else f"; a save with {_MEGATRON}dist_ckpt_optim_fully_reshardable=true can be resumed with any"
            ),
        )
        for key in now
        if key in then and now[key] != then[key] and (saved["form"] == IN_PARTS or key in _OF_EVERY_FORM)
    ]
    if problems:
        raise CheckpointError(problems)


def _require_whole_weights(path: Path) -> None:
    """Refuse what an older version has saved of Transformer Engine's optimizer: the low halves of the weights alone."""
    if any(tensor.dtype == torch.int16 for tensor in dist_checkpointing.load_tensors_metadata(str(path)).values()):
        problem = Problem(
            where=str(path),
            wrong="its optimizer holds half of each weight, as an older version of this recipe wrote it",
            fix="start a new run from the export of that step",
        )
        raise CheckpointError(problem)


def _text(value: Any) -> str:
    """Return a value as a configuration file has it."""
    return json.dumps(value) if not isinstance(value, str) else value
