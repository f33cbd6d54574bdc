"""Save and restore a trainer with Megatron's distributed checkpoints: model, optimizer, schedule, random generators.

Every rank writes its own part of the optimizer and a share of the weights, without sending either to another rank.
Such a checkpoint can be read back under any number of data-parallel ranks. Under the same layout training goes on bit
for bit. Learning rates, schedule, betas, epsilon and weight decay are those of the configuration, also when it has
changed. All ranks take part in both calls; making the directory appear atomically is the caller's business.

To go on under another tensor-parallel size, resume once under the old one with
`policy.megatron_cfg.dist_ckpt_optim_fully_reshardable: true` and let the run save. That form holds the optimizer per
parameter, so any layout reads it. To write it, one rank of each data-parallel group collects the group's optimizer in
its host memory (12 bytes per parameter of its part of the model).

Which saved optimizers a trainer can read: those whose parts have the names and the sizes of its own. What decides that
is also in a file that needs no torch, which the doctor reads.
"""

from __future__ import annotations

import logging
import os
import queue
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_model_config, unwrap_model
from torch.distributed.checkpoint import filesystem

from recipes.config.fits import FORM_FILE, IN_PARTS, PER_PARAMETER, form_problems, optimizer_keys, weights_identity
from recipes.errors import CheckpointError, Problem
from recipes.exact_json import dumps
from recipes.files import FileSum, SummedFile
from recipes.policy.hf import model_directory
from recipes.policy.host_copies import HostCopies
from recipes.policy.offloading.hybrid import OffloadedAdam
from recipes.policy.optimizer import optimizer_parts
from recipes.policy.step import Trainer, gather_params


def layout() -> dict[str, int]:
    """Sizes that decide which rank holds which part of the model and which random state."""
    return {
        "world_size": dist.get_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _has_experts(trainer: Trainer) -> bool:
    return bool(get_model_config(trainer.model).num_moe_experts)


def _require_whole_weights(path: Path) -> None:
    """Refuse what an older version has saved of Transformer Engine's optimizer: the low halves of the weights alone."""
    if any(tensor.dtype == torch.int16 for tensor in dist_checkpointing.load_tensors_metadata(str(path)).values()):
        problem = Problem(
            where=str(path),
            wrong="its optimizer holds half of each weight, as an older version of this recipe wrote it",
            fix="start a new run from the export of that step",
        )
        raise CheckpointError(problem)


logger = logging.getLogger(__name__)

_FORMAT = ("torch_dist", 1)
HEADS = "mtp."  # before the names of multi-token heads in a checkpoint


def save(trainer: Trainer, path: Path, *, with_optimizer: bool = True) -> None:
    """Write the state of all ranks into `path`, an existing empty directory."""
    taken = snapshot(trainer, path, HostCopies(), with_optimizer=with_optimizer)
    taken.write()
    taken.finish()


class Snapshot:
    """What this rank writes into a checkpoint, in memory of its own: training may change the state meanwhile."""

    def __init__(self, request: AsyncRequest, live: set[int], copies: HostCopies) -> None:
        """Take the tensors out of `request`; those on storages of `live` are the trainer's own, and are copied."""
        self._request = request
        rank, buckets, results = request.async_fn_args or (0, [], queue.SimpleQueue())
        if request.preload_fn is not None and torch.cuda.is_available():
            buckets = request.preload_fn()  # copies to the host
        self._arguments: tuple[Any, ...] = (
            rank,
            [(name, key, (data, [_own(item, live, copies) for item in items])) for name, key, (data, items) in buckets],
            results,
        )

    def write(self) -> dict[Path, FileSum]:
        """Write this rank's file, flushed to the disk; in any thread, without the other ranks. Returns its sum."""
        sums: dict[Path, FileSum] = {}
        if self._request.async_fn is not None:
            self._request.async_fn(*self._arguments, sums)
        return sums

    def finish(self) -> None:
        """Write what says where each tensor lies, once all ranks have written. Collective."""
        for finalize in self._request.finalize_fns:
            finalize()


def snapshot(trainer: Trainer, path: Path, copies: HostCopies, *, with_optimizer: bool = True) -> Snapshot:
    """Copy the state of all ranks, to be written into `path`, an existing empty directory. Collective.

    The snapshot before it in the memory of `copies` must have been written.
    """
    gather_params(trainer)
    if with_optimizer:
        _make_moments(trainer.optimizer)
    megatron = trainer.cfg.megatron_cfg
    in_parts = megatron.optimizer.use_distributed_optimizer and not megatron.dist_ckpt_optim_fully_reshardable
    form = IN_PARTS if in_parts else PER_PARAMETER
    state = _sharded_state(trainer, form if with_optimizer else None, is_loading=False)
    state["scheduler"] = trainer.scheduler.state_dict()
    keys = optimizer_keys(trainer.cfg, has_experts=_has_experts(trainer))
    saved = {
        "form": form if with_optimizer else None,
        "layout": layout(),
        "optimizer_keys": keys,
        "trains_heads": megatron.mtp_num_layers > 0,
        "base": weights_identity(model_directory(trainer.cfg.model_name)) if megatron.peft.enabled else None,
    }
    state["saved"] = {**saved, "rng": _all_rng_states()}
    strategy = FullyParallelSaveStrategyWrapper(_InProcessSave(*_FORMAT, thread_count=1), _replicas())
    live = {value.data.untyped_storage().data_ptr() for value in nested_values(state) if _is_tensor(value)}
    taken = Snapshot(dist_checkpointing.save(state, str(path), strategy, async_sharded_save=True), live, copies)
    if dist.get_rank() == 0:
        (path / FORM_FILE).write_bytes(dumps(saved))
    return taken


def load(trainer: Trainer, path: Path) -> None:
    """Restore what `save` wrote; raises `CheckpointError` when this layout cannot read it."""
    if not (path / "metadata.json").is_file():
        raise CheckpointError(
            Problem(
                where=str(path),
                wrong="this is no complete checkpoint of the policy: metadata.json is missing",
                fix="resume from another step",
            )
        )
    saved = dist_checkpointing.load_common_state_dict(str(path))["saved"]
    form: str | None = saved["form"]
    model = model_directory(trainer.cfg.model_name)
    if problems := form_problems(trainer.cfg, saved, path, model, has_experts=_has_experts(trainer)):
        raise CheckpointError(problems)
    if form is None:
        logger.warning("%s holds no optimizer: it starts anew, so training does not go on exactly", path)
    else:
        if "optimizer_keys" not in saved:
            _require_whole_weights(path)
        for own in (part.optimizer for part in optimizer_parts(trainer.optimizer).values()):
            if isinstance(own, OffloadedAdam):
                own.make_moments()
    state = dist_checkpointing.load(_sharded_state(trainer, form, is_loading=True), str(path))
    unwrap_model(trainer.model).load_state_dict(state["model"], strict=not trainer.cfg.megatron_cfg.peft.enabled)
    if trainer.heads is not None:
        own = {key.removeprefix(HEADS): value for key, value in state["heads"].items()}
        trainer.heads.load_state_dict(own)
    with torch.no_grad():  # in float32 the optimizer's shards are views of the parameters
        if form is None:
            _start_anew(trainer.optimizer)
        else:
            _load_optimizer(trainer.optimizer, state["optimizer"])
    trainer.scheduler.num_steps = 0  # Megatron adds the steps of the checkpoint to those that were taken here
    trainer.scheduler.load_state_dict(state["scheduler"])
    if saved["layout"] == layout():
        _restore_rng(saved["rng"][dist.get_rank()])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, ShardedTensor | ShardedTensorFactory) and isinstance(value.data, torch.Tensor)


def _own(item: tuple[Any, torch.Tensor], live: set[int], copies: HostCopies) -> tuple[Any, torch.Tensor]:
    """Return an item of a bucket whose tensor shares no memory with the trainer's."""
    what, tensor = item
    is_live = tensor.untyped_storage().data_ptr() in live
    return what, copies.copy(what.index, tensor) if is_live else tensor


class _InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Writes each rank's file in its own process.

    Megatron would fork writers and spawn a queue server. A Ray actor has many threads, which a fork copies
    in an unknown state, and Megatron waits without end for a writer that has died.
    """

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Plan as Megatron does; what it returns writes in the thread that calls it."""
        filesystem_async._results_queue = queue.SimpleQueue()  # else it spawns a process to hold one
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        if request.async_fn is not None:
            transforms = request.async_fn.args[0]
            request = request._replace(async_fn=partial(_write_bucket, transforms))
        return request


def _write_bucket(
    transforms: list[Any], rank: int, buckets: list[Any], results: queue.SimpleQueue[Any], sums: dict[Path, FileSum]
) -> None:
    """Write this rank's one bucket; the result is for Megatron, an exception is raised here, too, `sums` is added to.

    As Megatron's `write_preloaded_data`, with the file's sum computed on the way.
    """
    del rank
    ((path, key, (objects, tensors)),) = buckets  # one thread, one bucket
    (transform,) = transforms
    try:
        with SummedFile(Path(path)) as file:
            form = filesystem.SerializationFormat.TORCH_SAVE
            written = [
                filesystem._write_item(transform, file, data, item, key, form) for item, data in (*objects, *tensors)
            ]
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        results.put(error)
        raise
    results.put({0: written})
    sums[Path(path)] = file.sum()


def _make_moments(optimizer: Any) -> None:
    """Give every parameter moments of zero if it has none: Megatron saves them, but makes them in the first step."""
    for part in optimizer_parts(optimizer).values():
        if isinstance(part.optimizer, OffloadedAdam):
            part.optimizer.make_moments()
        elif part.config.use_precision_aware_optimizer:  # Megatron calls `initialize_state` as old releases had it
            params = [param for group in part.optimizer.param_groups for param in group["params"]]
            for param in (param for param in params if not part.optimizer.state[param]):
                part.optimizer.initialize_state(param, part.config.store_param_remainders)
        else:
            part.init_state_fn(part.optimizer, part.config)


def _start_anew(optimizer: Any) -> None:
    """Forget all moments, and take the weights that the model has now as those to go on from."""
    for part in optimizer_parts(optimizer).values():
        if isinstance(part.optimizer, OffloadedAdam):
            part.optimizer.start_anew()
        else:
            part.optimizer.state.clear()
    optimizer.reload_model_params()


def _sharded_state(trainer: Trainer, form: str | None, *, is_loading: bool) -> dict[str, Any]:
    """Return what is saved or loaded in parts; without a form that leaves out the optimizer."""
    metadata = {
        "distrib_optim_sharding_type": form,
        "distrib_optim_fully_reshardable_mem_efficient": True,  # else every rank gets the whole group's optimizer
        "dp_cp_group": _replicas(),
    }
    model = _trained(trainer, unwrap_model(trainer.model).sharded_state_dict(metadata=metadata))
    heads = {} if trainer.heads is None else trainer.heads.sharded_state_dict(prefix=HEADS, metadata=metadata)
    state = {"model": model, "heads": heads}
    if form is None:
        return state
    return {**state, "optimizer": _optimizer_state(trainer.optimizer, {**model, **heads}, metadata, is_loading)}


def _optimizer_state(
    optimizer: Any, model: dict[str, Any], metadata: dict[str, Any], is_loading: bool
) -> dict[str, dict[str, Any]]:
    """Return what is saved or loaded of each part of the optimizer. Collective.

    Only the last pipeline stage has that of multi-token heads. What Megatron would leave to rank 0 (steps, rates) is
    therefore an object of its own for each part, which the first of the ranks with that part writes.
    """
    parts, rank = optimizer_parts(optimizer), dist.get_rank()
    _synchronize(parts)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(parts))
    result = {}
    for name, part in parts.items():
        state = part.sharded_state_dict(model, is_loading, metadata=metadata)
        divided, rest = extract_matching_values(state, _is_sharded)
        add_prefix_for_sharding(divided, f"{name}.")
        copy = [place for place, held in enumerate(names) if name in held].index(rank)
        result[name] = {"divided": divided, "rest": ShardedObject(f"{name}.rest", rest, (1,), (0,), replica_id=copy)}
    return result


def _load_optimizer(optimizer: Any, state: dict[str, dict[str, Any]]) -> None:
    """Restore the tensors and the count of steps; all other values of the groups stay those of the configuration."""
    parts = optimizer_parts(optimizer)
    for name, part in parts.items():
        own = [{key: group[key] for key in group if key not in ("params", "step")} for group in part.param_groups]
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = partial(_set_tensors, part)
        part.load_state_dict(merge(state[name]["rest"], state[name].get("divided", {})))
        if isinstance(part.optimizer, OffloadedAdam):
            part.optimizer.drop_loaded_copies()
        for group, values in zip(part.param_groups, own, strict=True):
            group.update(values)
    _synchronize(parts)


def _synchronize(parts: dict[str, Any]) -> None:
    """Give the parameters of all parts one count of steps, as Megatron does it."""
    ChainedOptimizer(list(parts.values()))._synchronize_steps()


def _set_tensors(part: DistributedOptimizer, param: torch.Tensor, state: dict[str, Any]) -> None:
    """Set what the optimizer holds of a parameter, without the marks that Megatron leaves among the tensors.

    Transformer Engine's optimizer would take such a mark, whether an entry is padding, for a state of its own. A count
    of steps among them is that of before: the one of the checkpoint is with the groups.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and name != "step"}
    DistributedOptimizer._set_main_param_and_optimizer_states(part, param, tensors)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedBase | LocalNonpersistentObject)


def _is_frozen(stored: Any) -> bool:
    return isinstance(value := getattr(stored, "data", None), torch.nn.Parameter) and not value.requires_grad


def _trained(trainer: Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """Leave out the weights that lie beside adapters: `policy.model_name` has them, and they stay as they are there."""
    if not trainer.cfg.megatron_cfg.peft.enabled:
        return state
    return {name: one for name, one in state.items() if not _is_frozen(one)}


def model_state(model: Any, heads: Any | None) -> dict[str, Any]:
    """Return how Megatron stores each tensor of a model and of its heads, by its name in them."""
    metadata = {"distrib_optim_sharding_type": None, "dp_cp_group": _replicas()}
    of_heads = {} if heads is None else heads.sharded_state_dict(prefix=HEADS, metadata=metadata)
    return {**model.sharded_state_dict(metadata=metadata), **of_heads}


def _replicas() -> dist.ProcessGroup:
    """Return the ranks that hold the same weights as this one."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def _all_rng_states() -> list[dict[str, Any]]:
    own: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "tracker": {name: state.cpu() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state().cpu()
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, own)
    return states


def _restore_rng(own: dict[str, Any]) -> None:
    torch.set_rng_state(own["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(own["tracker"])
    if torch.cuda.is_available() and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
