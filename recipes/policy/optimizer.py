"""Megatron's DDP, optimizer and schedule, from our configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, _get_param_groups, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes.policy.cpu import Adam, use_exact_adam
from recipes.policy.model import DTYPES
from recipes.policy.offloading.hybrid import use_offloading
from recipes.policy.parallel import device, release_unused_memory

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig, PolicyConfig, SchedulerConfig


# Parameters per bucket of an overlapped reduction: Megatron's own value up to 40 data-parallel ranks. Above, its value
# grows with the ranks; a constant lets another number of ranks read the optimizer's checkpoint, which lies in buckets.
_BUCKET_SIZE = 40_000_000


def wrap_ddp(model: torch.nn.Module, config: TransformerConfig, cfg: MegatronConfig) -> DistributedDataParallel:
    """Give the model gradient buffers that are summed over data-parallel ranks."""
    return DistributedDataParallel(config, ddp_config(cfg), model)


def wrap_unloaded(model: torch.nn.Module, config: TransformerConfig, cfg: MegatronConfig) -> DistributedDataParallel:
    """Do what `wrap_ddp` does with a model whose weights are undefined; they are to be loaded afterwards.

    Megatron makes buffers for all weights and all gradients before it moves the first weight. So that a device need not
    hold the weights twice for a moment, which is more than training takes, those of the model give up theirs first.
    """
    if cfg.optimizer.use_distributed_optimizer:  # else weights stay where they are
        for param in (param for param in model.parameters() if param.requires_grad):
            one = param.data.new_zeros(1).untyped_storage()
            param.data = param.data.new_empty(0).set_(one, 0, param.shape, (0,) * param.dim())
        release_unused_memory()
    return wrap_ddp(model, config, cfg)


def ddp_config(cfg: MegatronConfig) -> DistributedDataParallelConfig:
    """Translate our configuration of gradient reduction."""
    ddp = cfg.distributed_data_parallel_config
    return DistributedDataParallelConfig(
        use_distributed_optimizer=cfg.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        overlap_param_gather=ddp.overlap_param_gather,
        bucket_size=_BUCKET_SIZE,
        average_in_collective=False,  # gradients of ranks add up and are divided afterwards
        check_for_nan_in_grad=False,  # it would end its rank alone, and the others would wait; see `is_finite`
    )


def build_optimizer(
    model: DistributedDataParallel, cfg: PolicyConfig, *, heads: DistributedDataParallel | None = None
) -> tuple[Any, OptimizerParamScheduler]:
    """Build the optimizer of the model, and of the multi-token heads if they are trained, and its schedule.

    One scheduler step is one batch, whatever number of optimizer steps it has.
    """
    use_exact_adam()
    own = cfg.megatron_cfg
    if _is_offloaded(own):
        use_offloading(Adam)
    optimizer = get_megatron_optimizer(optimizer_config(cfg), [model])
    if heads is not None:
        optimizer = HeadsApart(optimizer, get_megatron_optimizer(optimizer_config(cfg), [heads]))
    elif own.mtp_num_layers:  # another pipeline stage has them; Megatron compares groups of parameters over all ranks,
        for _ in ("dense weights", "experts"):  # once for each of these
            _get_param_groups([], optimizer_config(cfg), None)
    if own.optimizer.optimizer == "sgd":
        for part in optimizer.chained_optimizers:
            part.init_state_fn = _make_momenta  # Megatron has none for sgd, and calls it to load what it has saved
    return optimizer, _build_scheduler(optimizer, own.optimizer.lr, own.optimizer.min_lr, own.scheduler)


def _make_momenta(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Give every parameter a momentum of zero if it has none: the first step makes the same of it as of none.

    Also where momentum is 0 and nothing reads it, so that a checkpoint can be resumed with another value.
    """
    del config
    for group in optimizer.param_groups:
        for param in (param for param in group["params"] if not optimizer.state[param]):
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.data)


class HeadsApart(ChainedOptimizer):  # type: ignore[misc]
    """The optimizers of the model and of its heads as one, except that each of the two is clipped by its own norm."""

    def __init__(self, model: ChainedOptimizer, heads: ChainedOptimizer) -> None:
        super().__init__([*model.chained_optimizers, *heads.chained_optimizers])
        for part, group in zip(heads.chained_optimizers, _groups_of_a_stage(self.config), strict=False):
            part.grad_stats_parallel_group = group  # Megatron's spans the stages, of which one has the heads
        self.model, self.heads = model, heads
        self.heads_grad_norm = 0.0  # of the last step

    def step(self) -> tuple[bool, float | None, int | None]:
        """Update both; return whether that succeeded, the gradient norm of the model, and its zeros."""
        are_updated, norm, _ = self.heads.step()
        self.heads_grad_norm = float(norm or 0.0)
        is_updated, norm, zeros = self.model.step()
        return is_updated and are_updated, norm, zeros


def is_finite(optimizer: ChainedOptimizer, loss: float) -> bool:
    """Whether this rank's loss and the norm of all gradients are finite on every rank; all ranks call it together."""
    parts = [optimizer.heads, optimizer.model] if isinstance(optimizer, HeadsApart) else [optimizer]
    values = [loss]
    for part in parts:
        part.prepare_grads()
        values.append(float(part.get_grad_norm()))
    answer = torch.tensor(float(all(map(math.isfinite, values))), device=device())
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer.item())


def optimizer_parts(optimizer: ChainedOptimizer) -> dict[str, Any]:
    """Return the optimizers of which this rank's one is made, by the names that they have in a checkpoint."""
    names = ["optimizer.dense", "optimizer.experts"]
    if not isinstance(optimizer, HeadsApart):  # of a frozen trunk there is one in name only
        named = zip(names, optimizer.chained_optimizers, strict=False)
        return {name: part for name, part in named if not part.is_stub_optimizer}
    heads = dict(zip(["heads.dense", "heads.experts"], optimizer.heads.chained_optimizers, strict=False))
    return optimizer_parts(optimizer.model) | heads


def _groups_of_a_stage(config: OptimizerConfig) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the ranks of a pipeline stage over which norms are added up: of its dense weights, of its experts."""
    if config.use_distributed_optimizer:  # no rank has a gradient that another one has
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return stage, stage
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
    )


def _is_offloaded(cfg: MegatronConfig) -> bool:
    """Whether state goes from the device to the CPU: on a machine without CUDA it lies there anyway."""
    return cfg.optimizer.optimizer_cpu_offload and device().type == "cuda"


def optimizer_config(cfg: PolicyConfig) -> OptimizerConfig:
    """Translate our configuration of the optimizer.

    Megatron offloads as a precision-aware optimizer does its work, with master weights in the optimizer's state. That
    needs no Transformer Engine, and where nothing is offloaded after all it is plain Adam.
    """
    own, is_offloaded = cfg.megatron_cfg.optimizer, _is_offloaded(cfg.megatron_cfg)
    dtype = DTYPES[cfg.precision]
    config = OptimizerConfig(
        optimizer=own.optimizer,
        lr=own.lr,
        min_lr=own.min_lr,
        weight_decay=own.weight_decay,
        adam_beta1=own.adam_beta1,
        adam_beta2=own.adam_beta2,
        adam_eps=own.adam_eps,
        sgd_momentum=own.sgd_momentum,
        clip_grad=cfg.max_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=own.use_distributed_optimizer,
        use_precision_aware_optimizer=own.use_precision_aware_optimizer and not own.optimizer_cpu_offload,
        store_param_remainders=False,  # a checkpoint would hold half of each weight, which no other setting can read
        overlap_param_gather=cfg.megatron_cfg.distributed_data_parallel_config.overlap_param_gather,
        optimizer_cpu_offload=is_offloaded,
        optimizer_offload_fraction=own.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=own.overlap_cpu_optimizer_d2h_h2d,
    )
    if is_offloaded:  # only now: its constructor asks Transformer Engine for its release, also where that is not there
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return config


def _build_scheduler(optimizer: Any, lr: float, min_lr: float, cfg: SchedulerConfig) -> OptimizerParamScheduler:
    """Warm up linearly from `lr_warmup_init` (used by the first step) to `lr`, then follow `lr_decay_style`."""
    decay_steps = cfg.lr_decay_iters or cfg.lr_warmup_iters + 1  # only a decay style reads it
    return OptimizerParamScheduler(
        optimizer,
        init_lr=cfg.lr_warmup_init,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=cfg.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=cfg.lr_decay_style,
        start_wd=cfg.start_weight_decay,
        end_wd=cfg.end_weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style=cfg.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a checkpoint brings the count of steps alone
    )
