"""The trainer's side of a weight push: a shared-memory file on the CPU, NCCL on CUDA.

The file is named after the run's driver and locked while it is in use; the kernel drops the lock with the process, so a
later run can tell, and remove, the file of a run that was killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.types import WeightLayout

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "recipe-weights-"
_ALIGNMENT = 64  # bytes: a cache line, and what any dtype's view needs


def make_layout(shapes: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], *, path: str) -> WeightLayout:
    """Lay tensors one after the other, each on an aligned offset."""
    names, dtypes, all_shapes, offsets = [], [], [], []
    end = 0
    for name, dtype, shape in shapes:
        names.append(name)
        dtypes.append(str(dtype).removeprefix("torch."))
        all_shapes.append(shape)
        offsets.append(end)
        end += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return WeightLayout(
        path=path,
        names=tuple(names),
        dtypes=tuple(dtypes),
        shapes=tuple(all_shapes),
        offsets=tuple(offsets),
        num_bytes=end,
        host=socket.gethostname(),
    )


class SharedMemoryWriter:
    """Owns the file that the engines map; rank 0 of the policy has one."""

    def __init__(self, shapes: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], *, driver_pid: int) -> None:
        remove_stale_files()
        path = _SHARED_MEMORY / f"{_PREFIX}{driver_pid}-{os.getpid()}"
        self.layout = make_layout(shapes, path=str(path))
        temporary = path.with_name(f"{path.name}.tmp")
        self._file = temporary.open("w+b")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(self._file.fileno(), 0, self.layout.num_bytes)  # fails here, not with SIGBUS at a write
        self._bytes = torch.frombuffer(mmap.mmap(self._file.fileno(), self.layout.num_bytes), dtype=torch.uint8)
        temporary.rename(path)

    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite every tensor; `weights` comes in the order of the layout."""
        layout = self.layout
        written = 0
        for (name, tensor), expected, shape, offset in zip(
            weights, layout.names, layout.shapes, layout.offsets, strict=True
        ):
            assert name == expected and tuple(tensor.shape) == shape, f"{name} does not fit the layout's {expected}"
            num_bytes = tensor.numel() * tensor.element_size()
            self._bytes[offset : offset + num_bytes].view(tensor.dtype).view(shape).copy_(tensor)
            written += 1
        assert written == len(layout.names)

    def content(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the file as it is now, for engines on other hosts."""
        return self._bytes.numpy()

    def close(self) -> None:
        """Remove the file; engines that mapped it keep their mapping."""
        Path(self.layout.path).unlink(missing_ok=True)
        self._file.close()


def remove_stale_files() -> None:
    """Remove files whose owner is gone: nobody holds their lock any more."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}*[0-9]"):  # not those still being made
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # in use, gone meanwhile, or another user's


class NcclSender:
    """Broadcasts weights to vLLM's own NCCL weight-transfer engine; CUDA only."""

    def __init__(self, *, master_address: str, master_port: int, world_size: int) -> None:
        """Join as rank 0; blocks until all engine ranks (`world_size` - 1) have joined."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init  # needs CUDA libraries
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self._group: Any = trainer_init(
            NCCLTrainerInitInfo(master_address=master_address, master_port=master_port, world_size=world_size)
        )

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast in the packed form that the engines' update request announced."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(weights), group=self._group, src=0, post_iter_func=lambda item: item[1]
        )
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leave the group."""
        self._group.destroy()
