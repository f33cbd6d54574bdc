"""One rank's part of a checkpoint: copied into memory while training stands still, written while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from recipes.files import sync_files, sync_tree
from recipes.policy import checkpoint, hf
from recipes.policy.host_copies import HostCopies
from recipes.policy.step import Trainer

_OF_ONE_RANK = ".distcp"  # of the files that hold the tensors of a checkpoint


class BackgroundSave:
    """A save in progress. Made and finished by all ranks together; a thread of its own writes in between.

    It needs memory on the host for the copy: this rank's share of weights and optimizer, and on the rank that exports
    the whole model in its precision. `copies` keeps that memory for the next save.
    """

    def __init__(
        self,
        trainer: Trainer,
        path: Path,
        export: Callable[[], None] | None,
        copies: HostCopies,
        *,
        with_optimizer: bool,
    ) -> None:
        """Copy the state for `path`, an existing empty directory. `export` also runs in the thread."""
        self._snapshot = checkpoint.snapshot(trainer, path, copies, with_optimizer=with_optimizer)
        self._export = export
        self._path = path
        self.seconds = 0.0  # for which the thread has written
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] = self._pool.submit(self._write)
        self._pool.shutdown(wait=False)  # the thread ends after this

    def _write(self) -> None:
        start = time.monotonic()
        self._snapshot.write()
        if self._export is not None:
            self._export()
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


def export_copy(
    trainer: Trainer, path: Path, copies: HostCopies, side_files: Mapping[str, bytes]
) -> Callable[[], None] | None:
    """Copy the full weights into memory on the writer; returns what writes them as a Hugging Face directory.

    Collective over the ranks of a replica; None on those that only take part, which have no `side_files`.
    """
    if not side_files:
        for _ in trainer.export():
            pass
        return None
    weights: list[tuple[str, Tensor]] = [(name, copies.copy(name, tensor)) for name, tensor in trainer.export()]
    shapes = trainer.full_shapes()

    def write() -> None:
        hf.write_weights(shapes, weights, path)
        hf.write_side_files(side_files, path)
        sync_tree(path)

    return write
