"""One rank's part of a checkpoint: copied into memory while training stands still, written while it goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from recipes.files import FileSum, SummedFile, sync_files
from recipes.policy import checkpoint, hf
from recipes.policy.host_copies import HostCopies
from recipes.policy.lora import write_peft
from recipes.policy.step import Trainer

_OF_ONE_RANK = ".distcp"  # of the files that hold the tensors of a checkpoint


class BackgroundSave:
    """A save in progress. Made and finished by all ranks together; a thread of its own writes in between.

    It needs memory on the host for the copy: this rank's share of weights and optimizer, and on the ranks that export
    the files that each writes. `copies` keeps that memory for the next save.
    """

    def __init__(
        self,
        trainer: Trainer,
        path: Path,
        export: Callable[[], dict[Path, FileSum]] | None,
        copies: HostCopies,
        *,
        with_optimizer: bool,
    ) -> None:
        """Copy the state for `path`, an existing empty directory. `export` also runs in the thread."""
        self._snapshot = checkpoint.snapshot(trainer, path, copies, with_optimizer=with_optimizer)
        self._export = export
        self._path = path
        self.seconds = 0.0  # for which the thread has written
        self.sums: dict[Path, FileSum] = {}  # of the large files that it has written
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] = self._pool.submit(self._write)
        self._pool.shutdown(wait=False)  # the thread ends after this

    def _write(self) -> None:
        start = time.monotonic()
        self.sums = self._snapshot.write()
        if self._export is not None:
            self.sums |= self._export()
        self.seconds = time.monotonic() - start

    def is_written(self) -> bool:
        """Whether everything that this rank writes is on the disk; raises what kept it from being written."""
        if self._written.done():
            self._written.result()
        return self._written.done()

    def finish(self) -> None:
        """Write what says where each tensor lies, once all ranks have written. Collective; training stands still."""
        self._snapshot.finish()
        if dist.get_rank() == 0:  # it alone writes these files; each rank has flushed its own already
            sync_files(file for file in self._path.iterdir() if file.suffix != _OF_ONE_RANK)

    def wait(self) -> None:
        """Wait until the thread has ended, however it ends."""
        wait([self._written])


_TRIED_BYTES = 256 * 2**20  # enough to fill what a client of a parallel file system keeps in flight


def expected_seconds(trainer: Trainer, directory: Path, writers: Sequence[int], *, with_optimizer: bool) -> float:
    """Return how long this rank will write its part of a save, from the speed at which `directory` takes some of it.

    All ranks try at the same time: that is when they save. Nothing stays in the directory.
    """
    rank, num_bytes = dist.get_rank(), saved_bytes(trainer, with_optimizer=with_optimizer)
    if rank in writers:
        num_bytes += sum(map(hf.num_bytes, trainer.full_shapes())) // len(writers)
    block = os.urandom(2**20)  # no file system makes less of it
    num_blocks = max(1, -(-min(num_bytes, _TRIED_BYTES) // len(block)))
    path, start = directory / f"rank_{rank}", time.monotonic()
    try:
        with SummedFile(path) as file:
            for _ in range(num_blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return (time.monotonic() - start) * num_bytes / (num_blocks * len(block))
    finally:
        path.unlink(missing_ok=True)


def saved_bytes(trainer: Trainer, *, with_optimizer: bool) -> int:
    """Return about how many bytes this rank writes: its share of weights, their float32 copies and two moments each."""
    dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_world_size()
    models = [trainer.model] if trainer.heads is None else [trainer.model, trainer.heads]
    total = 0
    has_adapters = trainer.cfg.megatron_cfg.peft.enabled  # then the weights beside them are not saved
    left_out = {one for one in trainer.model.parameters() if has_adapters and not one.requires_grad}
    for param in {param for model in models for param in model.parameters()} - left_out:
        own = 12 if with_optimizer and param.requires_grad else 0
        total += (
            param.numel() * (param.element_size() + own) // (dense if getattr(param, "allreduce", True) else experts)
        )
    return total


def export_copy(
    trainer: Trainer, path: Path, copies: HostCopies, side_files: Mapping[str, bytes], writers: Sequence[int]
) -> Callable[[], dict[Path, FileSum]]:
    """Copy this rank's part of the full weights into memory; returns what writes its files of a Hugging Face directory.

    Collective over the ranks of a replica, `writers`: each has every tensor for a moment, and keeps and writes whole
    files. The one that has `side_files` also writes these, and which file holds which tensor.
    """
    shapes = trainer.full_shapes()
    files = hf.in_files(shapes)
    own = {name: files[name] for name in list(files)[writers.index(dist.get_rank()) :: len(writers)]}
    names = {name for tensors in own.values() for name, *_ in tensors}
    stream = hf.as_announced(trainer.export(), shapes)
    weights = {name: copies.copy(name, tensor) for name, tensor in stream if name in names}
    adapters = {name: tensor.cpu() for name, tensor in trainer.export_adapters().items()}

    def write() -> dict[Path, FileSum]:
        sums = hf.write_copies(own, weights, path)
        if side_files:
            hf.write_index(files, path)
            hf.write_side_files(side_files, path)
            if adapters:
                write_peft(adapters, trainer.cfg.megatron_cfg.peft, trainer.cfg.model_name, path)
            sync_files(file for file in path.rglob("*") if file.is_file() and file.name not in files)
        return sums

    return write
