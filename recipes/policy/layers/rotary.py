"""Rotary positions of packed rows, in plain torch.

Shape legend: T tokens of a row, h heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x_Thd: Tensor, angles_Tf: Tensor) -> Tensor:
    """Turn each pair of entries (i, i + d / 2) of a head by its angle; angles are [T, d / 2].

    Source: RoPE, https://arxiv.org/abs/2104.09864; its pairs are (i, i + 1).
    """
    cos, sin = (values.to(x_Thd.dtype)[:, None] for values in (angles_Tf.cos(), angles_Tf.sin()))
    result: Tensor = _Rotated.apply(x_Thd, cos, sin)  # type: ignore[no-untyped-call]
    return result


def rotary_angles(positions_T: Tensor, head_size: int, base: float) -> Tensor:
    """Return position * base ** (-2 i / d) in float32, [T, d / 2]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions_T.device) / head_size
    return positions_T[:, None] * (1.0 / base**exponents)


class _Rotated(torch.autograd.Function):
    """Keeps the angles only; the backward pass turns the gradient the other way."""

    @staticmethod
    def forward(ctx: Any, x_Thd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_Thd, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x_Thd: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    result = torch.empty_like(x_Thd, memory_format=torch.contiguous_format)
    (first, second), (of_first, of_second) = x_Thd.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(first, cos, out=of_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=of_second).addcmul_(first, sin, value=sign)
    return result
