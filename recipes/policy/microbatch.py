"""Lay rows of a batch end to end for the model, and bring per-token results back to padded rows.

Shape legend: B rows of the microbatch, S their padded length, T tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.policy.layers.packed import PackedSequences, packed_sequences
from recipes.policy.packing import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One forward and backward pass: a packed row and the way back to padded rows."""

    rows: Tensor  # int64 [B], into the shard's batch
    tokens_1T: Tensor  # int64
    labels_1T: Tensor  # int64, the next token of the same sequence; 0 where there is none
    sequences: PackedSequences
    source_BS: Tensor  # int64 [B, S-1]: entry t is where the row keeps the log-probability of token t + 1
    real_BS: Tensor  # bool [B, S-1], False on pads

    def unpack(self, logprobs_1T: Tensor) -> Tensor:
        """Return [B, S-1]; entry t belongs to token t + 1, pads are 0."""
        padded = logprobs_1T[0].index_select(0, self.source_BS.flatten()).view_as(self.source_BS)
        return padded * self.real_BS


def pack_microbatch(
    input_ids_BS: Tensor, lengths: Sequence[int], rows: Sequence[int], *, multiple: int, row_multiple: int
) -> Microbatch:
    """Pack `rows` of a right-padded batch.

    Args:
        lengths: unpadded lengths of all rows of the batch.
        multiple: each sequence is padded to it.
        row_multiple: the whole row is padded to it (sequence parallelism splits the row evenly).
    """
    own = [lengths[row] for row in rows]
    padded = [round_up(length, multiple) for length in own]
    starts = [sum(padded[:i]) for i in range(len(padded))]
    total = round_up(sum(padded), row_multiple)
    if total > sum(padded):
        padded.append(total - sum(padded))  # pads form a sequence of their own

    where = input_ids_BS.device
    rows_B = torch.tensor(list(rows), device=where)
    ids_BS = input_ids_BS.index_select(0, rows_B)[:, : max(own)]
    at_BS = torch.tensor(starts, device=where)[:, None] + torch.arange(max(own), device=where)
    lengths_B1 = torch.tensor(own, device=where)[:, None]
    inside_BS = torch.arange(max(own), device=where) < lengths_B1
    has_next_BS = inside_BS[:, 1:]

    tokens_T = ids_BS.new_zeros(total)
    tokens_T[at_BS[inside_BS]] = ids_BS[inside_BS]
    labels_T = ids_BS.new_zeros(total)
    labels_T[at_BS[:, :-1][has_next_BS]] = ids_BS[:, 1:][has_next_BS]
    return Microbatch(
        rows=rows_B,
        tokens_1T=tokens_T[None],
        labels_1T=labels_T[None],
        sequences=packed_sequences(padded, where, unpadded=own),
        source_BS=torch.where(has_next_BS, at_BS[:, :-1], 0),
        real_BS=has_next_BS,
    )
