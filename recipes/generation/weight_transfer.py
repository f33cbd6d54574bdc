"""How an engine receives the policy's weights, through vLLM's weight-transfer API.

On GPUs, vLLM's NCCL transfer is used as it is. On CPU none of vLLM's transfers works, so this module registers one more
under the name `shm`: the policy writes all tensors, whole and under their Hugging Face names, into a file in shared
memory (`WeightLayout`), and each engine maps that file and loads from it. vLLM's worker processes import this module
because the engine arguments name it as `worker_extension_cls`; on CPU this also installs what vLLM lacks there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
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

from recipes.generation import cpu_generator, cpu_hybrid, cpu_speculation

SHM_BACKEND = "shm"


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The fields of `WeightLayout`, as lists: they cross a msgpack boundary."""

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    num_bytes: int


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Empty, since the file holds all that a push needs."""


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

    def start_weight_update(self) -> None:
        """Unpack the layers: vLLM packs CPU weights after loading, and packed layers cannot be loaded."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load all tensors. The base class synchronizes an accelerator, which raises on CPU (vLLM 0.32)."""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load all tensors from the mapped file."""
        self.model.load_weights(self._tensors())

    def finish_weight_update(self) -> None:
        """Pack the layers again."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)
        pack_experts(self.model)

    def shutdown(self) -> None:
        """Release nothing: the mapping ends with the process."""

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        layout = self._layout
        for name, dtype_name, shape, offset in zip(
            layout.names, layout.dtypes, layout.shapes, layout.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            yield name, self._bytes[offset : offset + num_bytes].view(dtype).view(shape)


def pack_tied_head(model: torch.nn.Module) -> None:
    """Pack an output head that shares the embedding's weight.

    The reload packs only layers that received a tensor, and a tied head receives none. Without this call the head would
    go on with a packed copy of the old weights, and no error would say so (vLLM 0.32, CPU).
    """
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear") and head.weight.numel():
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of all mixtures of experts.

    A model's experts are packed when it is loaded, but a reload copies theirs in as they are. The packed kernel would
    read them in a wrong order, and no error would say so (vLLM 0.32, CPU).
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)


if current_platform.is_cpu():
    cpu_generator.install()
    cpu_hybrid.install()
    cpu_speculation.install()
if SHM_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(SHM_BACKEND, SharedMemoryWeightTransfer)


class WorkerExtension:
    """Has no methods: that the engine's arguments name it makes vLLM's workers import this module."""
