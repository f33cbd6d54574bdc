"""Causal attention over packed rows with torch's scaled_dot_product_attention.

A packed row holds many sequences end to end. Calling the kernel once per sequence costs more than the attention itself
when sequences are short, so sequences of similar length are gathered into one batch each. Trailing pads of a
batch need no mask: attention is causal and their outputs are dropped.

Shape legend: T tokens of a row, N sequences of a batch, L longest of them, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

_SHORTEST_IN_BATCH = 0.75  # share of the longest sequence of the batch; bounds the work on pads


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences of similar length, attended to in one call."""

    index_NL: Tensor  # positions in the row; pads repeat the sequence's last token
    real: Tensor  # flat positions in [0, N * L) of the tokens that are not pads


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed row, with the batches of this attention."""

    batches: list[AttentionBatch] = field(default_factory=list)
    # Where token t of the row lies in the concatenated outputs of the batches.
    scatter_T: Tensor = field(default_factory=lambda: torch.empty(0))


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """Describe a row of sequences with these (padded) lengths."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    batches = []
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        longest = lengths[order[0]]
        members = [i for i in order if lengths[i] >= _SHORTEST_IN_BATCH * longest]
        order = order[len(members) :]
        within = torch.arange(longest)
        lengths_N1 = torch.tensor([[lengths[i]] for i in members])
        starts_N1 = torch.tensor([[starts[i]] for i in members])
        index_NL = starts_N1 + torch.minimum(within, lengths_N1 - 1)
        real = (within < lengths_N1).flatten().nonzero()[:, 0]
        batches.append(AttentionBatch(index_NL.to(device), real.to(device)))
    visited_T = torch.cat([batch.index_NL.flatten()[batch.real] for batch in batches])
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        batches=batches,
        scatter_T=torch.argsort(visited_T),
    )


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Megatron core attention for packed rows: [T, h, d] in, [T, h * d] out; without context parallelism."""

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
