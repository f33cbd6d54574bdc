"""The trainer of one rank: log-probabilities of a batch, and one optimizer step over it.

Each microbatch adds the sum of its loss to the gradients, and counts what stays in the loss. After the last one
Megatron adds up gradients and counts over the data-parallel ranks and divides once, as for a loss per token.

Shape legend: B rows of a microbatch, S the longest of them, T = S - 1.

The reference policy: the weights that the stage started from, kept in host memory.

A trainer is built from `policy.model_name` before a checkpoint is loaded into it, so a copy taken in between holds the
start weights, also when a run resumes. For the reference's pass the copy takes the place of the trained weights. The
accelerator then never holds two models; the host holds one copy more for as long as the pass lasts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from recipes.config.packages import package_problems
from recipes.config.tree import PolicyConfig
from recipes.errors import ConfigError
from recipes.policy import hf
from recipes.policy.families import mapping
from recipes.policy.families.gather import FullWeights
from recipes.policy.heads import HeadTargets, HeadTraining, head_targets, share_embedding, train_heads
from recipes.policy.layers.context import share_over_context
from recipes.policy.layers.router import biases_now, routed_layers, take_changed_routes, take_expert_loads
from recipes.policy.layers.token_heads import TokenHeads
from recipes.policy.layout import check_model_fits
from recipes.policy.lora import adapters_of, begin_adapters, with_adapters
from recipes.policy.microbatch import Microbatch, pack_microbatch
from recipes.policy.model import build_heads, build_model, forward, transformer_config
from recipes.policy.offloading.state import state_on_host, with_state_on_host
from recipes.policy.optimizer import build_optimizer, is_finite, wrap_unloaded
from recipes.policy.parallel import device, finish_queued_work, release_unused_memory
from recipes.policy.shards import BatchShard, Measured, merge_metrics, merge_optimizer_steps
from recipes.routes import ROUTES_CHANGED, ROUTES_UNKNOWN, laid_out, num_unknown
from recipes.types import LossFunction, LossInputs, LossSums, PolicyRow, ReferenceUse, TokenAdvantages


class ReferenceWeights:
    """This rank's part of the start weights."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the parameters and buffers that `model` has now."""
        # A parameter that two modules share is there once. What is frozen beside adapters is the same at any time.
        has_adapters = bool(adapters_of(model))
        params = (param for param in model.parameters() if param.requires_grad or not has_adapters)
        self._tensors = [*params, *model.buffers()]
        self._start = _copies_on_host(self._tensors)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the start weights inside the block, and its own back after it, bit for bit."""
        own = _copies_on_host(self._tensors)
        _fill(self._tensors, self._start)
        try:
            yield
        finally:
            _fill(self._tensors, own)


def _copies_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


_AFTER_BACKWARD, _AFTER_STEP = 1, 2  # levels of empty_unused_memory_level

Rows = Sequence[Tensor]
"""One tensor per row of a shard; entry t belongs to token t of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What passes before an optimizer step have given, for the rows of its shard; None where nothing needs it."""

    previous: Rows | None = None  # log-probabilities before the first step of the batch, when that is another step
    reference: Rows | None = None  # log-probabilities under the reference policy
    advantages: Rows | None = None  # of the tokens, where they are not those of the rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The model, optimizer and schedule of this rank."""

    cfg: PolicyConfig
    loss: LossFunction
    model: DistributedDataParallel
    weights: FullWeights
    adapters: FullWeights | None  # of linear layers; None where the weights themselves are trained
    heads: TokenHeads | None  # of multi-token prediction; None where the model has none, or on another stage
    head_training: HeadTraining | None  # None where they are carried as they are
    optimizer: Any
    scheduler: OptimizerParamScheduler
    reference: ReferenceWeights | None  # None where nothing needs the reference policy
    token_advantages: TokenAdvantages | None  # None where every token has the advantage of its rollout
    replays: bool = False  # whether the engine's choices of experts take the place of the policy's own
    routed_layers: tuple[int, ...] = ()  # whose choices are replayed: this rank's layers with experts

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on the ranks of `Coordinates.exports`; all iterate to the end.

        The optimizer writes parameters, and an overlapped gather completes them, by kernels that may still be queued
        when `train_step` returns. A reader on another stream would not wait for them and could read weights that are
        one step old. So this waits for the device first, and all that reads parameters after a step reads them here.
        """
        finish_queued_work()
        return self.weights.export()

    def export_adapters(self) -> dict[str, Tensor]:
        """Return the adapters' full tensors by peft's names, empty where there are none; collective as `export`."""
        finish_queued_work()
        return {} if self.adapters is None else {name: one.clone() for name, one in self.adapters.export()}

    def pushed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what `export` does as engines get it: experts in blocks."""
        finish_queued_work()
        return self.weights.pushed()

    def pushed_shapes(self) -> list[mapping.TensorShape]:
        """Return name, dtype and shape of what `pushed` yields, in its order."""
        return self.weights.pushed_shapes()

    def full_shapes(self) -> list[mapping.TensorShape]:
        """Return name, dtype and shape of what `export` yields, in its order."""
        return self.weights.shapes()


def build_trainer(cfg: PolicyConfig, loss: LossFunction, *, reference: ReferenceUse | None = None) -> Trainer:
    """Build the model of `policy.model_name`, load its weights, and make the optimizer.

    With `reference` these weights are also kept, as those of the reference policy.
    """
    directory = hf.model_directory(cfg.model_name)
    hf_config, family = hf.read_config(directory)
    sizes = family.config(hf_config)
    has_cuda = torch.cuda.is_available()
    if problems := package_problems(cfg.megatron_cfg, sizes, has_cuda=has_cuda, imports=has_cuda):
        raise ConfigError(problems)
    check_model_fits(sizes, hf_config.vocab_size, cfg.megatron_cfg)
    reader = hf.WeightReader(directory)
    config = transformer_config(family, hf_config, cfg)
    replays = cfg.router_replay.enabled and bool(config.num_moe_experts)
    wrapped = wrap_unloaded(build_model(family, hf_config, config, cfg), config, cfg.megatron_cfg)
    own = with_adapters(family.weights(unwrap_model(wrapped)), unwrap_model(wrapped))
    heads = build_heads(family, hf_config, config)
    if heads is not None:
        of_heads = family.head_weights(heads)
        if reader.has(of_heads[0].names[0]):
            own += of_heads
        else:
            heads = None  # config.json has them, the checkpoint has lost them
    weights = FullWeights(own, config, device())
    reader.check_all_used(weights.names() | family.unread_weights(hf_config))
    mapping.load(own, config, reader)
    added = begin_adapters(unwrap_model(wrapped))

    head_training = train_heads(heads, unwrap_model(wrapped), config, cfg)
    optimizer, scheduler = build_optimizer(wrapped, cfg, heads=head_training and head_training.model)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if wrapped.ddp_config.overlap_grad_reduce and not cfg.megatron_cfg.freeze_trunk:
        config.no_sync_func = partial(_without_sync, wrapped, head_training)
    return Trainer(
        cfg=cfg,
        loss=loss,
        model=wrapped,
        weights=weights,
        adapters=FullWeights(added, config, device()) if cfg.megatron_cfg.peft.enabled else None,
        heads=heads,
        head_training=head_training,
        optimizer=optimizer,
        scheduler=scheduler,
        reference=ReferenceWeights(unwrap_model(wrapped)) if reference is not None and reference.keeps_start else None,
        token_advantages=None if reference is None else reference.token_advantages,
        replays=replays,
        routed_layers=routed_layers(unwrap_model(wrapped)) if replays else (),
    )


def train_steps(trainer: Trainer, parts: Sequence[BatchShard]) -> dict[str, Measured]:
    """Take one optimizer step per part of a batch, then one of the schedule; return what was measured."""
    passes, metrics = passes_before(trainer, parts)
    steps = [train_step(trainer, *pair) for pair in zip(parts, passes, strict=True)]
    if not all(step["skipped_steps"] for step in steps):  # it counts batches, as a run counts its steps
        trainer.scheduler.step(increment=1)
    return metrics | (steps[0] if len(steps) == 1 else merge_optimizer_steps(steps))


def passes_before(trainer: Trainer, parts: Sequence[BatchShard]) -> tuple[list[Passes], dict[str, Measured]]:
    """Run the passes that must see the weights before the first step of a batch; return what each part needs.

    With several parts these are the log-probabilities that the ratios compare with. Where the advantages depend on
    the KL to the reference policy, they are computed here, with their metrics.
    """
    has_steps = len(parts) > 1 and not trainer.cfg.megatron_cfg.freeze_trunk  # where nothing moves, nothing is compared
    if not has_steps and trainer.token_advantages is None:
        return [Passes() for _ in parts], {}
    with state_on_host(trainer):
        previous = [logprobs(trainer, part) for part in parts]
    passes = [Passes(previous=own if has_steps else None) for own in previous]
    if trainer.token_advantages is None:
        return passes, {}
    rows: list[PolicyRow] = []
    with state_on_host(trainer):
        for part, own in zip(parts, previous, strict=True):
            rows += _policy_rows(part, own, reference_logprobs(trainer, part))
    advantages, metrics = trainer.token_advantages(rows, _sum_over_replicas)
    ends = itertools.accumulate(len(own) for own in previous)
    return [
        replace(own, advantages=advantages[end - len(part.batch.lengths_B) : end])
        for part, own, end in zip(parts, passes, ends, strict=True)
    ], metrics


def _policy_rows(shard: BatchShard, logprobs: Rows, reference: Rows | None) -> list[PolicyRow]:
    masks, advantages = shard.batch.sample_mask_B.tolist(), shard.batch.advantages_B.tolist()
    pairs = [0] * len(masks) if shard.batch.pair_B is None else shard.batch.pair_B.tolist()
    result = []
    for number, own_S in enumerate(logprobs):
        row = shard.row(number)
        taught = row.teacher_logprobs()
        result.append(
            PolicyRow(
                advantage=advantages[number],
                loss_mask_S=torch.from_numpy(row.token_mask()) * masks[number],
                logprobs_S=own_S,
                reference_logprobs_S=None if reference is None else reference[number],
                teacher_logprobs_S=None if taught is None else torch.from_numpy(taught),
                pair=pairs[number],
            )
        )
    return result


def _sum_over_replicas(own: Tensor) -> Tensor:
    """Add a tensor up over the data-parallel ranks; context-parallel ranks hold the same rows."""
    total = own.to(device(), copy=True)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu()


def train_step(trainer: Trainer, shard: BatchShard, passes: Passes | None = None) -> dict[str, Measured]:
    """Take one optimizer step over all rows of all shards; return what this rank has measured of loss and optimizer.

    Where loss or gradients are not finite, weights, biases and optimizer stay as they are, and `skipped_steps` is 1.
    """
    level = trainer.cfg.megatron_cfg.empty_unused_memory_level
    biases = biases_now(trainer.model, trainer.heads)  # Megatron moves them with the gradients, before these are seen
    is_frozen = trainer.cfg.megatron_cfg.freeze_trunk
    accumulate = accumulate_head_gradients if is_frozen else accumulate_gradients
    metrics = accumulate(trainer, shard, passes or Passes())
    if level >= _AFTER_BACKWARD:
        release_unused_memory()
    lr = get_canonical_lr_for_logging(trainer.optimizer.param_groups) or 0.0  # a stage without heads may train nothing
    metrics["wd"] = (trainer.scheduler.get_wd(), 1.0)
    loss = metrics.get("loss", 0.0)
    is_taken, grad_norm = is_finite(trainer.optimizer, loss[0] if isinstance(loss, tuple) else loss), math.nan
    if is_taken:
        is_taken, grad_norm, _ = trainer.optimizer.step()
        assert is_taken, "only a scaled loss lets Megatron skip a step, and none is scaled"
    else:
        for bias, before in biases:
            bias.copy_(before)
    gather_params(trainer)
    if trainer.head_training is not None:
        metrics["mtp/grad_norm"] = (trainer.optimizer.heads_grad_norm, 1.0) if is_taken else (0.0, 0.0)
    if level >= _AFTER_STEP:
        release_unused_memory()
    if is_frozen:  # routers count in passes with a gradient alone
        return metrics | {"lr": float(lr), "skipped_steps": float(not is_taken)}
    if trainer.cfg.megatron_cfg.moe_per_layer_logging:
        loads = take_expert_loads(unwrap_model(trainer.model))
        metrics |= {f"expert_load/layer_{number}": (ratio, 1.0) for number, ratio in loads.items()}
    if trainer.replays:
        metrics[ROUTES_CHANGED] = take_changed_routes(unwrap_model(trainer.model))
    return metrics | {"grad_norm": float(grad_norm), "lr": float(lr), "skipped_steps": float(not is_taken)}


def accumulate_gradients(trainer: Trainer, shard: BatchShard, passes: Passes) -> dict[str, Measured]:
    """Run forward and backward over all microbatches and reduce the gradients; return this rank's loss metrics."""
    if trainer.token_advantages is None:  # else the loss has no term for the reference
        passes = replace(passes, reference=reference_logprobs(trainer, shard))
    trainer.model.train()
    heads = _begin_step(trainer)

    # All context-parallel ranks compute the same loss, and Megatron adds up what they count.
    counts = int(parallel_state.get_context_parallel_rank() == 0)

    def loss_function(packed: Microbatch) -> Callable[..., Any]:
        def loss(logprobs_1T: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
            inputs, current_BT = loss_inputs(shard, packed, logprobs_1T, passes)
            sums = trainer.loss(current_BT, inputs)
            count = sums.count.to(torch.int) * counts
            metrics = {**sums.metrics, **(_fallback(shard, packed) if trainer.replays else {})}
            if heads is None:
                return sums.loss, count, metrics
            targets = _head_targets(shard, packed, sums, num_heads=heads.num_heads)
            of_heads, of_training = heads.loss(unwrap_model(trainer.model), packed, targets)
            return sums.loss + of_heads, count, {**metrics, **of_training}

        return loss

    outputs = _run(trainer, shard, loss_function, forward_only=False)
    if heads is not None:
        heads.finish()
    return merge_metrics(_on_host(outputs)) if outputs else {}


def accumulate_head_gradients(trainer: Trainer, shard: BatchShard, passes: Passes) -> dict[str, Measured]:
    """Run the frozen policy forward and only its heads backward too: MTP healing; return this rank's loss metrics.

    The heads learn the policy's own answers by their negative log-likelihood. The loss that the policy was given says,
    as in other stages, which rows count; nothing is trained by it.
    """
    trainer.model.eval()
    heads, left = _begin_step(trainer), itertools.count(len(shard.microbatches) - 1, -1)

    def train_function(packed: Microbatch) -> Callable[..., Any]:
        def train(logprobs_1T: Tensor, non_loss_data: bool) -> Mapping[str, Any]:
            del non_loss_data
            assert heads is not None, "the last stage has the heads"
            inputs, current_BT = loss_inputs(shard, packed, logprobs_1T, passes)
            sums = trainer.loss(current_BT, inputs)
            targets = _head_targets(shard, packed, sums, num_heads=heads.num_heads)
            with torch.enable_grad(), heads.model.no_sync() if next(left) else nullcontext():
                of_heads, of_training = heads.loss(unwrap_model(trainer.model), packed, targets)
                of_heads.backward()  # type: ignore[no-untyped-call]
            return {**sums.metrics, **(_fallback(shard, packed) if trainer.replays else {}), **of_training}

        return train

    with torch.no_grad():
        outputs = _run(trainer, shard, train_function, forward_only=True)
    if heads is not None:
        heads.finish()
    return merge_metrics(_on_host(outputs)) if outputs else {}


def _begin_step(trainer: Trainer) -> HeadTraining | None:
    """Forget the gradients of the last step; return the heads that this rank trains."""
    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    heads = trainer.head_training
    share_embedding(unwrap_model(trainer.model), heads, trainer.cfg.megatron_cfg)
    if heads is not None:
        heads.begin()
    return heads


def _fallback(shard: BatchShard, packed: Microbatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Count the tokens that the policy routes itself, because the engine has not reported their routes."""
    rows = [shard.row(row) for row in packed.rows]
    unknown = sum(num_unknown(row.routes, len(row.token_ids)) for row in rows)
    total = sum(len(row.token_ids) - 1 for row in rows)
    where = packed.tokens_1T.device
    return {ROUTES_UNKNOWN: (torch.tensor(unknown, device=where), torch.tensor(total, device=where))}


def _head_targets(shard: BatchShard, packed: Microbatch, sums: LossSums, *, num_heads: int) -> HeadTargets:
    rows = [shard.row(row) for row in packed.rows]
    ids, masks = [row.token_ids for row in rows], [row.token_mask() for row in rows]
    return head_targets(packed, ids, masks, sums.sample_mask_B, num_heads=num_heads)


@contextmanager
def _without_sync(model: DistributedDataParallel, heads: HeadTraining | None) -> Iterator[None]:
    """Add up gradients in place, of all microbatches but the last."""
    with model.no_sync(), nullcontext() if heads is None else heads.model.no_sync():
        yield


def _on_host(outputs: Sequence[Mapping[str, Tensor | tuple[Tensor, Tensor]]]) -> list[dict[str, Measured]]:
    """Copy the metrics of all microbatches from the device, all at once."""
    tensors = [value for output in outputs for value in output.values()]
    pairs = [value if isinstance(value, tuple) else (value, value) for value in tensors]
    numbers = iter(torch.stack([part.double() for pair in pairs for part in pair]).view(-1, 2).tolist())
    return [
        {name: tuple(next(numbers)) if isinstance(value, tuple) else next(numbers)[0] for name, value in output.items()}
        for output in outputs
    ]


@with_state_on_host
def logprobs(trainer: Trainer, shard: BatchShard) -> list[Tensor]:
    """Return the log-probabilities of each row under the current weights, on the CPU.

    Entry t of a row belongs to its token t; the first is 0.
    """
    trainer.model.eval()
    result = [torch.zeros(length) for length in shard.batch.lengths_B.tolist()]

    def collect_function(packed: Microbatch) -> Callable[..., Any]:
        def collect(logprobs_1T: Tensor, non_loss_data: bool) -> tuple[tuple[int, ...], Tensor]:
            del non_loss_data
            return packed.rows, packed.unpack(logprobs_1T)

        return collect

    with torch.no_grad():
        for rows, part_BS in _run(trainer, shard, collect_function, forward_only=True):
            for row, part_S in zip(rows, part_BS.cpu(), strict=True):
                result[row][1:] = part_S[: len(result[row]) - 1]
    return result


def reference_logprobs(trainer: Trainer, shard: BatchShard) -> list[Tensor] | None:
    """Return what `logprobs` returns, under the reference policy; None where nothing needs it.

    It replays the same routes: a policy that has not moved is then at no distance from it.
    """
    if trainer.reference is None:
        return None
    finish_queued_work()  # the trained weights are read and put back: none of their values may still be on its way
    with trainer.reference.in_place():
        return logprobs(trainer, shard)


def gather_params(trainer: Trainer) -> None:
    """Gather the parameters now, where an overlapped gather would end in the next forward pass."""
    if not trainer.model.ddp_config.overlap_param_gather:
        return
    for model in [trainer.model, *([] if trainer.head_training is None else [trainer.head_training.model])]:
        for group in model.bucket_groups + model.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None:  # begun before the step, of a layer whose weight alone is read:
                group.param_gather_handle.wait()  # Megatron would take its end for that of a gather after the step
                group.param_gather_handle = None
        model.start_param_sync(force_sync=True)


def loss_inputs(
    shard: BatchShard, packed: Microbatch, logprobs_1T: Tensor, passes: Passes | None = None
) -> tuple[LossInputs, Tensor]:
    """Bring one microbatch into the form of the loss: here a value of a row becomes one value per token.

    Without the log-probabilities before the first optimizer step of the batch, this pass itself has those weights.
    """
    passes = passes or Passes()
    batch, rows = shard.batch, [shard.row(row) for row in packed.rows]
    rows_B, where = torch.tensor(packed.rows), logprobs_1T.device
    of_rows = passes.advantages or batch.advantages_B
    advantages = [of_rows[row].numpy() for row in packed.rows]
    current_BT = packed.unpack(logprobs_1T)

    def align(values: Rows) -> Tensor:
        return packed.align([values[row].numpy() for row in packed.rows])

    inputs = LossInputs(
        token_mask_BT=packed.align([row.token_mask() for row in rows]),
        sample_mask_B=batch.sample_mask_B[rows_B].to(where),
        advantages_BT=packed.align(
            [row.advantages(own, batch.flag_advantages) for row, own in zip(rows, advantages, strict=True)]
        ),
        rewards_B=batch.rewards_B[rows_B].to(where),
        prev_logprobs_BT=current_BT.detach() if passes.previous is None else align(passes.previous),
        generation_logprobs_BT=packed.align([row.logprobs() for row in rows]),
        reference_logprobs_BT=None if passes.reference is None else align(passes.reference),
        nll_weight_B=None if batch.nll_weight_B is None else batch.nll_weight_B[rows_B].to(where),
        row_weight_B=None if batch.row_weight_B is None else batch.row_weight_B[rows_B].to(where),
    )
    return inputs, current_BT


def _run(
    trainer: Trainer, shard: BatchShard, function_of: Callable[[Microbatch], Callable[..., Any]], *, forward_only: bool
) -> list[Any]:
    """Run Megatron's schedule over the microbatches; return one output of the last stage's function for each."""

    def forward_step(microbatches: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        packed = next(microbatches)
        return forward(model, packed.tokens_1T, packed.labels_1T, packed.sequences), function_of(packed)

    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_microbatches(trainer, shard),
        model=trainer.model,
        num_microbatches=len(shard.microbatches),
        seq_length=trainer.cfg.max_total_sequence_length,  # read by pipeline stages with fixed shapes only
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        # Of one rank an all-reduce moves nothing; a reduce-scatter would copy all gradients twice.
        force_all_reduce=parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1,
    )
    return outputs


def _microbatches(trainer: Trainer, shard: BatchShard) -> Iterator[Microbatch]:
    megatron = trainer.cfg.megatron_cfg
    context = parallel_state.get_context_parallel_group()
    chunks = 2 * context.size() if context.size() > 1 else 1
    for rows in shard.microbatches:
        own = [shard.row(row) for row in rows]
        packed = pack_microbatch(
            [row.token_ids for row in own],
            rows,
            multiple=trainer.cfg.make_sequence_length_divisible_by,
            row_multiple=chunks * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1),
            where=device(),
        )
        if trainer.routed_layers and any(row.routes for row in own):
            num_chosen = get_model_config(trainer.model).moe_router_topk
            packed = packed.with_routes(
                [laid_out(row.routes, len(row.token_ids), trainer.routed_layers, num_chosen) for row in own]
            )
        if context.size() > 1:
            packed = replace(packed, sequences=share_over_context(packed.sequences, context))
        yield packed
