"""RMS norm for Megatron layer specs, in plain torch.

A linear layer that every tensor-parallel rank holds whole, for Megatron layer specs without Transformer Engine.

The activation of a gated MLP, in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional


class ReplicatedLinear(torch.nn.Module):
    """What Transformer Engine's linear is with `parallel_mode="duplicated"`: [..., inputs] to [..., outputs]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        # With sequence parallelism each rank sees a part of the tokens: the gradient is summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product and no bias, as Megatron's linear layers do."""
        return functional.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight to a distributed checkpoint: whole on every rank."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return sharded


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
