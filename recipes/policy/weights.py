"""The trainer's side of a weight push: a shared-memory file on the CPU, NCCL on CUDA.

The file is named after the run's driver and locked while it is in use. The kernel drops the lock when the process ends,
so a later run recognizes the file of a killed run and removes it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from recipes.errors import EngineError, PolicyError, Problem, resource_problem
from recipes.types import PUSH_BUCKET_BYTES, WeightLayout

T = TypeVar("T")

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "recipe-weights-"
_ALIGNMENT = 64  # bytes: a cache line, and what any dtype's view needs
_LOOK_SECONDS = 0.5  # between two looks at whether a wait for engines is to be given up
_LEAVE_SECONDS = 60.0  # to make the tensors that are left of one, with the other ranks


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
        # Other users of the machine shall not read weights, nor make a file of this name first: they cannot guess it.
        path = _SHARED_MEMORY / f"{_PREFIX}{driver_pid}-{os.getpid()}-{secrets.randbelow(10**12)}"
        layout = make_layout(shapes, path=str(path))
        self.layout = replace(layout, count_offset=layout.num_bytes, num_bytes=layout.num_bytes + _ALIGNMENT)
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            self._file = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600), "w+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._file.fileno(), 0, self.layout.num_bytes)  # fails here, not with SIGBUS at a write
        except OSError as error:
            temporary.unlink(missing_ok=True)
            is_full = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
            problem = no_room(error, self.layout.num_bytes) if is_full else resource_problem(error, str(temporary))
            raise PolicyError(str(problem)) from error
        self._bytes = torch.frombuffer(mmap.mmap(self._file.fileno(), self.layout.num_bytes), dtype=torch.uint8)
        self._count = self._bytes[layout.num_bytes :][:8].view(torch.int64).numpy()
        temporary.rename(path)

    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, Tensor]], *, num_before: int) -> None:
        """Overwrite every tensor; `weights` comes in the order of the layout.

        Earlier pushes have written `num_before` tensors. The file counts on from there, so that an engine can load one
        tensor while the next is written.
        """
        pairs = zip(checked(weights, self.layout), self.layout.offsets, strict=True)
        for number, ((_, tensor), offset) in enumerate(pairs, start=num_before + 1):
            num_bytes = tensor.numel() * tensor.element_size()
            self._bytes[offset : offset + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._count[0] = number  # after the tensor: x86-64, where CPU engines run, keeps the order of stores

    def content(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the file as it is now, for engines on other hosts."""
        return self._bytes.numpy()

    def close(self) -> None:
        """Remove the file; engines that mapped it keep their mapping."""
        Path(self.layout.path).unlink(missing_ok=True)
        self._file.close()


def no_room(error: OSError, num_bytes: int) -> Problem:
    """Return why the file of the weights could not be made."""
    wrong = f"{error.strerror}, and the weights that are pushed to the engines need {num_bytes / 2**20:.1f} MiB there"
    fix = "make it larger: mount -o remount,size=..., or a container's --shm-size or --ipc=host"
    return Problem(where=str(_SHARED_MEMORY), wrong=wrong, fix=fix)


def remove_stale_files() -> None:
    """Remove this user's files that no process has locked: their owners are gone."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}*[0-9]"):  # not those still being made
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                continue  # another user may have put a pipe there, which would be waited for
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # in use, gone meanwhile, or another user's


class NcclSender:
    """Broadcasts weights to vLLM's own NCCL weight-transfer engine; CUDA only.

    vLLM packs and broadcasts on side streams that wait for no other stream. So every tensor is made on the stream on
    which `write` is called, after everything that was queued there before, and each side stream waits for it.
    """

    def __init__(
        self,
        layout: WeightLayout,
        *,
        nccl_id: bytes,
        world_size: int,
        timeout_s: float,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Join as rank 0; blocks until all engine ranks (`world_size` - 1) have joined.

        `layout` is what the engines were told to expect, `nccl_id` what `make_nccl_id` returned in this process.
        Raises `EngineError` when an engine rank has not joined after `timeout_s`, or once `is_cancelled`.
        """
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group  # needs CUDA libraries

        self._layout = layout
        self._has_left = False
        device = torch.cuda.current_device()
        self._group: Any = within(
            timeout_s,
            lambda: uid_init_process_group(nccl_id, rank=0, world_size=world_size, device=device),
            what=f"weight push: the NCCL group of the policy and {world_size - 1} engine ranks",
            is_cancelled=is_cancelled,
        )

    def write(
        self, weights: Iterable[tuple[str, Tensor]], *, timeout_s: float, is_cancelled: Callable[[], bool]
    ) -> None:
        """Broadcast in the packed form that the engines' update request announced; returns when all is sent.

        Raises `EngineError` when that takes longer than `timeout_s`, or once `is_cancelled`: an engine that dies leaves
        all others waiting. The group is left then, which ends the broadcasts that wait, and the rest of `weights` is
        made and not sent, since the other ranks make it together with this one.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        stream = torch.cuda.current_stream()
        made = _made_on(stream, checked(weights, self._layout))

        has_ended = Event()

        def send() -> None:
            try:
                packed_nccl_broadcast_producer(
                    iterator=made,
                    group=self,
                    src=0,
                    post_iter_func=lambda item: item[1],
                    buffer_size_bytes=PUSH_BUCKET_BYTES,
                )
                stream.synchronize()
            finally:
                has_ended.set()

        try:
            within(timeout_s, send, what="weight push: the broadcast to the engines", is_cancelled=is_cancelled)
        except EngineError:
            self.close()
            has_ended.wait(_LEAVE_SECONDS)
            raise

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Send one packed buffer, for vLLM; nothing once the group has been left."""
        if not self._has_left:
            self._group.broadcast(tensor, src=src)

    def close(self) -> None:
        """Leave the group; leaving again does nothing."""
        if not self._has_left:
            self._has_left = True
            self._group.destroy()


def make_nccl_id() -> bytes:
    """Return a new NCCL id, 128 bytes: who has it can join the group that this process, its rank 0, waits for."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary  # needs CUDA libraries

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def within(timeout_s: float, call: Callable[[], T], *, what: str, is_cancelled: Callable[[], bool]) -> T:
    """Return what `call` returns; raises `EngineError` when that takes longer than `timeout_s`, or once `is_cancelled`.

    For calls that wait for the engines without a deadline. The call then goes on, in a thread that does not keep the
    process, and the caller's process can still save what it holds.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:  # raised below, in the caller's thread
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    end = time.monotonic() + timeout_s
    while not wait([outcome], timeout=min(max(end - time.monotonic(), 0.0), _LOOK_SECONDS)).done:
        if is_cancelled():
            raise EngineError(f"{what}: given up, since an engine has failed")
        if time.monotonic() >= end:
            raise EngineError(f"{what} not complete within {timeout_s:g} s")
    return outcome.result()


def checked(weights: Iterable[tuple[str, Tensor]], layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on that come in the order of `layout`, with its names, dtypes and shapes.

    Raises `PolicyError` at the first that does not, before it is passed on: the readers cut the bytes by the layout,
    so a tensor out of place would become other weights there without any error.
    """
    iterator = iter(weights)
    for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
        announced = f"{name} ({dtype} {list(shape)})"
        found = next(iterator, None)
        if found is None:
            raise PolicyError(f"weight push: the policy has no tensor left, the engines still expect {announced}")
        sent, tensor = found
        got = f"{sent} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"
        if got != announced:
            raise PolicyError(f"weight push: the policy sends {got}, the engines expect {announced}")
        yield sent, tensor
    extra = next(iterator, None)
    if extra is not None:
        raise PolicyError(f"weight push: the policy sends {extra[0]}, the engines expect no more tensors")


def _made_on(stream: torch.cuda.Stream, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Run `weights` on `stream`, whatever stream the reader is on, and let the reader's stream wait for each tensor."""
    while True:
        with torch.cuda.stream(stream):
            item = next(weights, None)
        if item is None:
            return
        reader = torch.cuda.current_stream()
        reader.wait_stream(stream)
        item[1].record_stream(reader)  # its memory is not given away before the reader is done
        yield item
