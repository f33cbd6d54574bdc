"""The memory into which a save copies tensors, kept from save to save."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class HostCopies:
    """Copies on the host. The next copy under a key takes the memory of the one before.

    New memory costs a page fault for each of its pages, and training stands still meanwhile. A copy must therefore be
    written before another of its key is made.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def copy(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of `tensor`, of any shape and from any device."""
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._kept[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept.copy_(tensor)
