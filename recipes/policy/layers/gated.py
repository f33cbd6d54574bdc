"""The activation of a gated MLP, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional


class GatedSilu(MegatronModule):  # type: ignore[misc]
    """silu(gate) * up of [..., gate and up], a Megatron activation module; Megatron's own code copies and keeps more.

    Source: SwiGLU of https://arxiv.org/abs/2002.05202.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., f] of [..., 2 * f]."""
        result: Tensor = _Gated.apply(x)  # type: ignore[no-untyped-call]
        return result


class _Gated(torch.autograd.Function):
    """Keeps its input for the backward pass, and computes the activation again there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), (grad,) = ctx.saved_tensors, grads
        gate, up = x.chunk(2, dim=-1)
        of_x = torch.empty_like(x)
        of_gate, of_up = of_x.chunk(2, dim=-1)
        torch.mul(grad, functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return of_x
