"""Recomputation of whole layers in the backward pass, where Megatron's hybrid stack ignores the request for it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor


def recompute_in_backward(layer: torch.nn.Module) -> None:
    """Let a layer keep its input only, and compute the rest again in the backward pass."""
    inner = layer.forward

    def forward(hidden_states: Tensor, **others: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(hidden_states=hidden_states, **others)

        def run(hidden: Tensor) -> Any:
            return inner(hidden_states=hidden, **others)

        return tensor_parallel.checkpoint(run, False, hidden_states)

    layer.forward = forward  # type: ignore[method-assign]
