"""The description of a packed row, for Megatron and for our attention over it.

A packed row holds many sequences end to end. Calling the kernel once per sequence costs more than the attention itself
when sequences are short, so sequences of similar length are gathered into one batch each. Trailing pads of a
batch need no mask: attention is causal and their outputs are dropped.

Shape legend: T tokens of a row, N sequences of a batch, L longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

_SHORTEST_IN_BATCH = 0.75  # share of the longest sequence of the batch; bounds the work on pads


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences of similar length, attended to in one call."""

    index_NL: Tensor  # positions in the row; pads repeat the sequence's last token
    is_row: bool = False  # these positions are those of the whole row in its order: nothing needs to move


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed row, with the batches of this attention."""

    batches: list[AttentionBatch] = field(default_factory=list)
    # Where token t of the row lies in the concatenated outputs of the batches, pads included.
    scatter_T: Tensor = field(default_factory=lambda: torch.empty(0))
    positions_T: Tensor = field(default_factory=lambda: torch.empty(0))  # of each token in its sequence, from 0
    pads_1T: Tensor = field(default_factory=lambda: torch.empty(0))  # bool, True on pads
    routes_TLK: Tensor | None = None  # int16, of this rank's layers with experts, see `recipes.routes`; None: no replay


def packed_sequences(
    lengths: Sequence[int], device: torch.device, *, unpadded: Sequence[int] | None = None
) -> PackedSequences:
    """Describe a row of sequences with these (padded) lengths.

    Args:
        unpadded: how many tokens of each sequence are no pads; 0 for those at the end that it leaves out.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    batches, visited, places, num_before = [], [], [], 0
    for members in similar_lengths(lengths):
        longest = lengths[members[0]]
        within = torch.arange(longest)
        lengths_N1 = torch.tensor([[lengths[i]] for i in members])
        starts_N1 = torch.tensor([[starts[i]] for i in members])
        index_NL = starts_N1 + torch.minimum(within, lengths_N1 - 1)
        real = (within < lengths_N1).flatten().nonzero()[:, 0]
        visited.append(index_NL.flatten()[real])
        places.append(num_before + real)
        num_before += index_NL.numel()
        is_row = len(real) == index_NL.numel() == starts[-1] and members == sorted(members)
        batches.append(AttentionBatch(index_NL.to(device), is_row))
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,  # Transformer Engine asks for them with context parallelism
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        batches=batches,
        scatter_T=torch.cat(places)[torch.argsort(torch.cat(visited))].to(device),
        positions_T=torch.cat([torch.arange(length) for length in lengths]).to(device),
        pads_1T=_pads(lengths, lengths if unpadded is None else unpadded).to(device)[None],
    )


def _pads(lengths: Sequence[int], unpadded: Sequence[int]) -> Tensor:
    real = [*unpadded, *[0] * (len(lengths) - len(unpadded))]
    return torch.cat([torch.arange(length) >= own for length, own in zip(lengths, real, strict=True)])


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group the sequences by length, longest first."""
    groups = []
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        members = [i for i in order if lengths[i] >= _SHORTEST_IN_BATCH * lengths[order[0]]]
        groups.append(members)
        order = order[len(members) :]
    return groups
