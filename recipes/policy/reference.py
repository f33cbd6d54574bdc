"""The reference policy: the weights that the stage started from, kept in host memory.

A trainer is built from `policy.model_name` before a checkpoint is loaded into it, so a copy taken in between holds the
start weights, also when a run resumes. For the reference's pass the copy takes the place of the trained weights. The
accelerator then never holds two models; the host holds one copy more for as long as the pass lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """This rank's part of the start weights."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the parameters and buffers that `model` has now."""
        self._tensors = [*model.parameters(), *model.buffers()]  # a parameter that two modules share is there once
        self._start = _on_host(self._tensors)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the start weights inside the block, and its own back after it, bit for bit."""
        own = _on_host(self._tensors)
        _fill(self._tensors, self._start)
        try:
            yield
        finally:
            _fill(self._tensors, own)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
