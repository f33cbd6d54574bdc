"""How an engine receives the policy's weights, through vLLM's weight-transfer API.

On GPUs, vLLM's NCCL transfer is used as it is. On CPU none of vLLM's transfers works, so this module registers one more
under the name `shm`: the policy writes all tensors, whole and under their Hugging Face names, into a file in shared
memory (`WeightLayout`), and each engine maps that file and loads from it. vLLM's worker processes import this module
because the engine arguments name it as `worker_extension_cls`; on CPU this also installs what vLLM lacks there. Either
way a push also loads the model's own multi-token heads where an engine drafts with them (`drafter.py`).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from recipes.checksums import checksum
from recipes.errors import EngineError, Problem
from recipes.generation import cpu_hybrid
from recipes.generation.direct_load import DirectLoad, record
from recipes.generation.drafter import PushedModels, pushed_drafter
from recipes.types import experts_of

SHM_BACKEND = "shm"
_POLL_SECONDS = 0.0005  # between two looks at what the policy has written


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The fields of `WeightLayout`, as lists: they cross a msgpack boundary."""

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    num_bytes: int
    count_offset: int | None


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Whether the policy is still writing the file: then each tensor is waited for."""

    num_before: int | None = None  # tensors that earlier pushes have written; None: all of this push are in the file
    wait_seconds: float = 0.0


class WeightCopy:
    """A copy of the policy's file on another host. It lies in memory of this process; its workers open it by path."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create("weights")
        os.ftruncate(self._file, num_bytes)
        self._bytes = np.frombuffer(mmap.mmap(self._file, num_bytes), dtype=np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Replace the copy by `content`, the bytes of the whole file."""
        self._bytes[:] = content


class SharedMemoryWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads the model from a mapped file. The layout of the file is given once, at the start."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Map the file and keep its layout; raises `ValueError` when the file is shorter than its layout."""
        size = Path(init_info.path).stat().st_size
        if size < init_info.num_bytes:
            raise ValueError(f"{init_info.path} has {size} bytes, its layout says {init_info.num_bytes}")
        with Path(init_info.path).open("r+b") as file:
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), init_info.num_bytes), dtype=torch.uint8)
        self._layout = init_info
        self._pushed_as = [number for number, name in enumerate(init_info.names) for _ in experts_of(name) or (name,)]
        self._direct: DirectLoad | None = None
        self._is_recorded = False

    def start_weight_update(self) -> None:
        """Do nothing: what a push needs before it, `receive_weights` does."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load all tensors. The base class synchronizes an accelerator, which raises on CPU (vLLM 0.32)."""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load all tensors from the mapped file, each once it is written; raises `TimeoutError` when one is late."""
        end = time.monotonic() + update_info.wait_seconds

        def wait_for(number: int) -> None:  # of `tensors`
            if update_info.num_before is not None:
                self._wait(update_info.num_before + self._pushed_as[number] + 1, end)

        if not self._is_recorded:
            tensors = list(self.tensors())
            wait_for(-1)
            self._direct = record(self.model, self.model_config, tensors, self._bytes)
            self._is_recorded = True
        if self._direct is not None:
            self._direct.load(wait_for)
        wait_for(-1)  # also for tensors that this rank does not use: they are verified
        if self._direct is None:
            initialize_layerwise_reload(self.model)  # unpacks: vLLM packs CPU weights, and cannot load packed layers
            self.model.load_weights(self.tensors())
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Pack what the layers do not pack one by one."""
        pack_heads(self.model)
        pack_experts(self.model)

    def _wait(self, count: int, end: float) -> None:
        """Wait until the policy has written `count` tensors, over all pushes."""
        assert self._layout.count_offset is not None, "the file has no count"
        written = self._bytes[self._layout.count_offset :][:8].view(torch.int64).numpy()
        while written[0] < count:
            if time.monotonic() > end:
                raise TimeoutError(f"weight push: the policy has written {written[0]} of {count} tensors in time")
            time.sleep(_POLL_SECONDS)

    def shutdown(self) -> None:
        """Release nothing: the mapping ends with the process."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors by name, experts one by one; they are views of the file."""
        for name, tensor in self.pushed():
            experts = experts_of(name)
            yield from zip(experts, tensor.unbind(), strict=True) if experts else [(name, tensor)]

    def pushed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors as the policy has written them."""
        layout = self._layout
        for name, dtype_name, shape, offset in zip(
            layout.names, layout.dtypes, layout.shapes, layout.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            yield name, self._bytes[offset : offset + num_bytes].view(dtype).view(shape)


def pack_heads(model: torch.nn.Module) -> None:
    """Pack the output heads, also one that shares the embedding's weight and so receives no tensor of its own.

    Without this call it would go on with a packed copy of the old weights, and no error would say so (vLLM 0.32, CPU).
    """
    for head in {getattr(part, "lm_head", None) for part in model.modules()}:
        if head is not None and hasattr(head, "cpu_linear") and head.weight.numel():
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of all mixtures of experts.

    A model's experts are packed when it is loaded, but a push copies theirs in as they are. The packed kernel would
    read them in a wrong order, and no error would say so (vLLM 0.32, CPU).
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)


@contextmanager
def noted(engine: WeightTransferEngine, received: dict[str, torch.Tensor]) -> Iterator[None]:
    """Enter the checksum of each tensor that `engine` receives in this block.

    vLLM's NCCL transfer hands each tensor to the model as it comes. A model may load from our file in other ways, so it
    is read once more.
    """
    if isinstance(engine, SharedMemoryWeightTransfer):
        yield
        received.update((name, checksum(tensor)) for name, tensor in engine.pushed())
        return
    model = engine.model  # a push that fails sets another one
    load = model.load_weights

    def load_and_note(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        pairs = list(weights)  # views of one buffer
        received.update((name, checksum(tensor)) for name, tensor in pairs)
        return load(iter(pairs))

    model.load_weights = load_and_note
    try:
        yield
    finally:
        del model.load_weights  # the class has its own


if current_platform.is_cpu():
    cpu_hybrid.install_generators()
    cpu_hybrid.install()
    cpu_hybrid.install_speculation()
    cpu_hybrid.install_routes()
if SHM_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(SHM_BACKEND, SharedMemoryWeightTransfer)


def _blocks(update_info: dict[str, Any]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return the blocks of experts among the tensors that vLLM's NCCL transfer receives."""
    lists = (update_info.get(key, []) for key in ("names", "dtype_names", "shapes"))
    return [
        (name, getattr(torch, dtype), tuple(shape))
        for name, dtype, shape in zip(*lists, strict=True)
        if experts_of(name) is not None
    ]


class WorkerExtension:
    """vLLM's workers get its method. That the engine's arguments name it also makes them import this module."""

    _models: PushedModels | None = None  # made at the first push of a layout
    _announced: tuple[str, dict[str, Any]] = "", {}

    def announce_pushes(self: Any, layout: str, update_info: dict[str, Any]) -> None:
        """Keep what is the same for all pushes of a layout, which has this digest: with NCCL all names and shapes."""
        self._announced, self._models = (layout, update_info), None

    def load_pushed_weights(self: Any, layout: str, update_info: dict[str, Any], is_verified: bool) -> dict[str, int]:
        """Take all steps of a push in one call: each call to the worker's process takes about half a millisecond.

        `layout` is the digest of the layout that is meant. With `is_verified` it returns a checksum of each tensor as
        it was received. Raises `EngineError`, before anything is received, when another layout was announced.
        """
        announced, common = self._announced
        if layout != announced:
            raise EngineError(
                str(
                    Problem(
                        where="weight push",
                        wrong=f"it is sent by the layout {layout}, and this engine was told {announced or 'none'}",
                        fix="start the engine again, which connects it by the present layout",
                    )
                )
            )
        received: dict[str, torch.Tensor] = {}
        if self._models is None:
            self._models = PushedModels(self.get_model(), pushed_drafter(self), _blocks(common))
        self.weight_transfer_engine.set_weight_update_target(self._models, self.model_config)
        self.start_weight_update()
        with noted(self.weight_transfer_engine, received) if is_verified else nullcontext():
            self.update_weights({**common, **update_info})
        self.finish_weight_update()
        self._models.require_drafter()
        return {name: int(value) for name, value in received.items()}
