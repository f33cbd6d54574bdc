"""RMS norm for Megatron layer specs, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension; Megatron's own plain-torch norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., hidden_size]."""
        if x.is_cuda or x.dtype != torch.float32:
            return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        result: Tensor = _Normalized.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result


class _Normalized(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight, which keeps x for the backward pass and no other tensor of its size.

    On CUDA torch has a kernel that does so; on a CPU it adds up smaller functions, each of which keeps its input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normed = x * scale
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        own = grad * weight
        along = (own * normed).mean(-1, keepdim=True)
        return own.addcmul_(normed, along, value=-1).mul_(scale), of_weight, None
