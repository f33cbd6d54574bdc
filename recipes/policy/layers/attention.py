"""Causal attention over packed rows with torch's scaled_dot_product_attention.

Shape legend: T tokens of a row, N sequences of a batch, L longest of them, h heads, d head size.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from recipes.policy.layers.context import ContextSequences, attend
from recipes.policy.layers.packed import AttentionBatch, PackedSequences


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Megatron core attention for packed rows: [T, h, d] in, [T, h * d] out."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        del layer_number, attn_mask_type, attention_type
        self._scale = softmax_scale

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
        if isinstance(packed_seq_params, ContextSequences):
            group = parallel_state.get_context_parallel_group()
            return attend(query, key, value, packed_seq_params, scale=self._scale, group=group)
        outputs = []
        for batch in packed_seq_params.batches:
            q, k, v = (_gather(x, batch) for x in (query, key, value))
            attended = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, batch.real))
        output = torch.cat(outputs).index_select(0, packed_seq_params.scatter_T)
        return output.flatten(1)


def _gather(rows_Thd: Tensor, batch: AttentionBatch) -> Tensor:
    """Return [N, h, L, d]."""
    num, longest = batch.index_NL.shape
    gathered = rows_Thd.index_select(0, batch.index_NL.flatten())
    return gathered.view(num, longest, *rows_Thd.shape[1:]).transpose(1, 2)
