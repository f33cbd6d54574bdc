"""Context parallelism over packed rows: which tokens a rank holds, and attention across the ranks.

Each sequence is cut into 2 * size chunks, and rank r holds chunks r and 2 * size - 1 - r, so that causal attention
costs every rank the same. Megatron's fused rotary embedding and Mamba layers expect this order too.

Shape legend: T tokens of the whole row, O = T / size tokens of this rank, N sequences of a batch, L queries of one of
them, K its keys, h heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from recipes.policy.layers.packed import PackedSequences


@dataclass(frozen=True, slots=True)
class ContextBatch:
    """One of this rank's two chunks of sequences of one length: its queries, and all keys up to its last one.

    Query l of L sees the first K - L + l + 1 keys. Such a mask needs no memory on CUDA.
    """

    queries_NL: Tensor  # positions among this rank's tokens
    keys_NK: Tensor  # positions in the whole row


@dataclass
class ContextSequences(PackedSequences):
    """A packed row of which this rank holds a share."""

    own_O: Tensor = field(default_factory=lambda: torch.empty(0))  # positions in the row of this rank's tokens
    restore_T: Tensor = field(default_factory=lambda: torch.empty(0))  # where token t lies among all ranks' tokens
    context_batches: list[ContextBatch] = field(default_factory=list)


def held_positions(bounds: Tensor, *, rank: int, size: int) -> Tensor:
    """Return the positions that a rank holds of sequences between `bounds`, all multiples of 2 * size; int64 [O]."""
    lengths = bounds.diff()
    start_T, length_T = bounds[:-1].repeat_interleave(lengths), lengths.repeat_interleave(lengths)
    chunk_T = (torch.arange(len(start_T), device=bounds.device) - start_T) * (2 * size) // length_T
    holder_T = torch.minimum(chunk_T, 2 * size - 1 - chunk_T)
    return (holder_T == rank).nonzero()[:, 0]


def share_over_context(sequences: PackedSequences, group: dist.ProcessGroup) -> ContextSequences:
    """Describe this rank's share of a row whose (padded) lengths are multiples of twice the group's size."""
    size, bounds = group.size(), sequences.cu_seqlens_q
    held = [held_positions(bounds, rank=rank, size=size) for rank in range(size)]
    own_O = held[group.rank()]
    lengths = bounds.diff().tolist()
    starts = bounds.tolist()
    place_T = torch.argsort(torch.cat(held))
    batches = []
    for length in sorted(set(lengths)):
        starts_N1 = torch.tensor([[start] for start, own in zip(starts, lengths, strict=False) if own == length])
        chunk = length // (2 * size)
        for place, number in enumerate((group.rank(), 2 * size - 1 - group.rank())):
            queries_NL = starts_N1 // size + place * chunk + torch.arange(chunk)
            keys_NK = starts_N1 + torch.arange((number + 1) * chunk)
            batches.append(ContextBatch(queries_NL.to(bounds.device), keys_NK.to(bounds.device)))
    visited_O = torch.cat([batch.queries_NL.flatten() for batch in batches])
    same = {f.name: getattr(sequences, f.name) for f in fields(PackedSequences)}
    return ContextSequences(
        **same | {"batches": [], "scatter_T": torch.argsort(visited_O), "positions_T": sequences.positions_T[own_O]},
        own_O=own_O,
        restore_T=place_T,
        context_batches=batches,
    )


def attend(
    query_Ohd: Tensor,
    key_Ohd: Tensor,
    value_Ohd: Tensor,
    sequences: ContextSequences,
    *,
    scale: float | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return causal attention within each sequence for this rank's queries, [O, h * d]."""
    both = torch.cat([key_Ohd, value_Ohd], dim=-1)
    # Every rank uses all keys: the backward pass sums what the ranks have for each of them.
    gathered = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=group)
    key_Thd, value_Thd = gathered.index_select(0, sequences.restore_T).chunk(2, dim=-1)
    outputs = []
    for batch in sequences.context_batches:
        q = _rows(query_Ohd, batch.queries_NL)
        k, v = (_rows(x, batch.keys_NK) for x in (key_Thd, value_Thd))
        mask = causal_lower_right(q.shape[2], k.shape[2])
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, sequences.scatter_T).flatten(1)


def gather_row(values_1O: Tensor, sequences: ContextSequences, group: dist.ProcessGroup) -> Tensor:
    """Return [1, T] in the order of the row, on every rank; the gradient of a token goes to the rank that holds it."""
    gathered_T = gather_from_sequence_parallel_region(values_1O[0], tensor_parallel_output_grad=False, group=group)
    row_1T: Tensor = gathered_T.index_select(0, sequences.restore_T)[None]
    return row_1T


def _rows(x_Thd: Tensor, index_NL: Tensor) -> Tensor:
    """Return [N, h, L, d]."""
    return x_Thd.index_select(0, index_NL.flatten()).view(*index_NL.shape, *x_Thd.shape[1:]).transpose(1, 2)
