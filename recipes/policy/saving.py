"""One rank's part of a checkpoint: copied into memory while training stands still, written while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist

from recipes.files import FileSum, sync_files
from recipes.policy import checkpoint, hf
from recipes.policy.host_copies import HostCopies
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

    def write() -> dict[Path, FileSum]:
        sums = hf.write_copies(own, weights, path)
        if side_files:
            hf.write_index(files, path)
            hf.write_side_files(side_files, path)
            sync_files(file for file in path.rglob("*") if file.is_file() and file.name not in files)
        return sums

    return write
