"""Save and restore a trainer with Megatron's distributed checkpoints: model, optimizer, schedule, random generators.

A checkpoint can be read back under another parallel layout. Under the same one, training goes on bit for bit.
All ranks take part in both calls; making the directory appear atomically is the caller's business.
"""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.utils import unwrap_model

from recipes.errors import CheckpointError, Problem
from recipes.policy.step import Trainer, gather_params

_FORMAT = ("torch_dist", 1)


def save(trainer: Trainer, path: Path) -> None:
    """Write the state of all ranks into `path`, an existing empty directory."""
    gather_params(trainer)
    _make_moments(trainer.optimizer)
    state = _sharded_state(trainer, is_loading=False)
    state["scheduler"] = trainer.scheduler.state_dict()
    state["rng"] = {"layout": _layout(), "states": _all_rng_states()}
    dist_checkpointing.save(state, str(path), _InProcessSave(*_FORMAT, thread_count=1))


def load(trainer: Trainer, path: Path) -> None:
    """Restore what `save` wrote."""
    if not (path / "metadata.json").is_file():
        raise CheckpointError(
            Problem(
                where=str(path),
                wrong="this is no complete checkpoint of the policy: metadata.json is missing",
                fix="resume from another step",
            )
        )
    state = dist_checkpointing.load(_sharded_state(trainer, is_loading=True), str(path))
    unwrap_model(trainer.model).load_state_dict(state["model"])
    with torch.no_grad():  # in float32 the optimizer's shards are views of the parameters
        trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.num_steps = 0  # Megatron adds the steps of the checkpoint to those that were taken here
    trainer.scheduler.load_state_dict(state["scheduler"])
    if state["rng"]["layout"] == _layout():
        _restore_rng(state["rng"]["states"][dist.get_rank()])


class _InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Writes each rank's file in its own process.

    Megatron would fork writers and spawn a queue server. A Ray actor is full of threads that a fork copies in
    an unknown state, and a writer that dies there is waited for forever.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Plan as Megatron does, write here, let Megatron finish."""
        filesystem_async._results_queue = queue.SimpleQueue()  # else it spawns a process to hold one
        request = self.async_save(sharded_state_dict, checkpoint_dir)
        if request.async_fn is not None:
            transforms = request.async_fn.args[0]
            request = request._replace(async_fn=partial(_write_bucket, transforms))
        request.execute_sync()


def _write_bucket(transforms: list[Any], rank: int, buckets: list[Any], results: queue.SimpleQueue[Any]) -> None:
    """Write this rank's one bucket and leave the result, or the exception, where Megatron looks for it."""
    del rank
    (bucket,) = buckets  # one thread, one bucket
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, done, _NoCount(), True)
    index, written = done.get()
    results.put(written if isinstance(written, Exception) else {index: written})


class _NoCount:
    """Where Megatron's writer processes sign off; there is only this one."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def _make_moments(optimizer: Any) -> None:
    """Give every parameter its moments, zero, which Megatron saves but makes in the first step; harmless after it."""
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)


def _sharded_state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",  # may be read back with other parallel sizes
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap_model(trainer.model).sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _layout() -> list[int]:
    """Sizes that decide which rank owns which random state."""
    return [
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    ]


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
