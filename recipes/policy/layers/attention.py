"""Causal attention over packed rows with torch's scaled_dot_product_attention.

Shape legend: T tokens of a row, N sequences of a batch, L longest of them, h heads, d head size.

Rotary positions of packed rows, in plain torch.

Shape legend: T tokens of a row, h heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from recipes.policy.layers.context import ContextSequences, attend
from recipes.policy.layers.packed import AttentionBatch, PackedSequences


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


def core_attention(config: TransformerConfig, *, rotary_base: float | None = None) -> ModuleSpec:
    """Return Transformer Engine's attention, or the one below, as `policy.megatron_cfg.attention_backend` asks."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return ModuleSpec(module=TEDotProductAttention)
    return ModuleSpec(module=CoreAttention, params={"rotary_base": rotary_base} if rotates(config) else {})


def rotates(config: TransformerConfig) -> bool:
    """Whether the attention below rotates queries and keys, and Megatron does not."""
    return config.transformer_impl == "local" and not config.apply_rope_fusion


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Megatron core attention for packed rows: [T, h, d] in, [T, h * d] out.

    With `rotary_base` it also rotates queries and keys by their positions, which Megatron then leaves alone.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        rotary_base: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        del layer_number, attn_mask_type, attention_type
        self._scale = softmax_scale
        self._rotary_base = rotary_base

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSequences,
        **_: object,
    ) -> Tensor:
        """Attend within each sequence of the row."""
        del attention_mask
        if self._rotary_base is not None:
            angles_Tf = rotary_angles(packed_seq_params.positions_T, query.shape[-1], self._rotary_base)
            query, key = rotate(query, angles_Tf), rotate(key, angles_Tf)
        if isinstance(packed_seq_params, ContextSequences):
            group = parallel_state.get_context_parallel_group()
            return attend(query, key, value, packed_seq_params, scale=self._scale, group=group)
        outputs = []
        for batch in packed_seq_params.batches:
            q, k, v = (_gather(x, batch) for x in (query, key, value))
            attended = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        if packed_seq_params.batches[0].is_row:
            return outputs[0].flatten(1)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.index_select(0, packed_seq_params.scatter_T).flatten(1)


def _gather(rows_Thd: Tensor, batch: AttentionBatch) -> Tensor:
    """Return [N, h, L, d]."""
    gathered = rows_Thd if batch.is_row else rows_Thd.index_select(0, batch.index_NL.flatten())
    return gathered.view(*batch.index_NL.shape, *rows_Thd.shape[1:]).transpose(1, 2)
