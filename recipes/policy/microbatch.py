"""Lay rows end to end for the model, and bring per-token results and the loss's inputs into rows of one width.

Shape legend: B rows of the microbatch, S the longest of them, T tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.policy.layers.packed import PackedSequences, packed_sequences
from recipes.policy.packing import round_up
from recipes.routes import UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One forward and backward pass: a packed row and the way back to its rows."""

    rows: tuple[int, ...]  # [B], of the shard's batch
    tokens_1T: Tensor  # int64
    labels_1T: Tensor  # int64, the next token of the same sequence; 0 where there is none
    starts: tuple[int, ...]  # [B], where each row begins in the packed row
    sequences: PackedSequences
    source_BS: Tensor  # int64 [B, S-1]: entry t is where the row keeps the log-probability of token t + 1
    real_BS: Tensor  # bool [B, S-1], False on pads

    def unpack(self, logprobs_1T: Tensor) -> Tensor:
        """Return [B, S-1]; entry t belongs to token t + 1, pads are 0."""
        padded = logprobs_1T[0].index_select(0, self.source_BS.flatten()).view_as(self.source_BS)
        return padded * self.real_BS

    def align(self, values: Sequence[NDArray[np.float32]]) -> Tensor:
        """Return what `unpack` aligns with: [B, S-1] from one array per row, whose entry t belongs to token t."""
        aligned_BS = torch.zeros(self.source_BS.shape)
        for row_S, own in zip(aligned_BS, values, strict=True):
            row_S[: len(own) - 1] = torch.tensor(own[1:])
        return aligned_BS.to(self.source_BS.device, non_blocking=True)

    def with_routes(self, routes: Sequence[NDArray[np.int16]]) -> Microbatch:
        """Return it with the routes of its tokens, [S, L, K] of each row; pads have none."""
        total = self.tokens_1T.shape[1]
        routes_TLK = np.full((total, *routes[0].shape[1:]), UNKNOWN, np.int16)
        for start, own in zip(self.starts, routes, strict=True):
            routes_TLK[start : start + len(own)] = own
        placed = torch.from_numpy(routes_TLK).to(self.tokens_1T.device)
        return replace(self, sequences=replace(self.sequences, routes_TLK=placed))


def pack_microbatch(
    ids: Sequence[NDArray[np.int32]], rows: Sequence[int], *, multiple: int, row_multiple: int, where: torch.device
) -> Microbatch:
    """Pack the token ids of `rows`, one array each, for the device `where`.

    Args:
        multiple: each sequence is padded to it.
        row_multiple: the whole row is padded to it (sequence parallelism splits the row evenly).
    """
    own = [len(row_ids) for row_ids in ids]
    padded = [round_up(length, multiple) for length in own]
    starts = np.cumsum([0, *padded])[:-1]
    total = round_up(sum(padded), row_multiple)
    if total > sum(padded):
        padded.append(total - sum(padded))  # pads form a sequence of their own

    tokens_T, labels_T = np.zeros(total, np.int64), np.zeros(total, np.int64)
    for start, row_ids in zip(starts, ids, strict=True):
        tokens_T[start : start + len(row_ids)] = row_ids
        labels_T[start : start + len(row_ids) - 1] = row_ids[1:]
    places_S = torch.arange(max(own) - 1, device=where)
    real_BS = places_S < torch.tensor(own, device=where)[:, None] - 1
    return Microbatch(
        rows=tuple(rows),
        tokens_1T=torch.from_numpy(tokens_T).to(where)[None],
        labels_1T=torch.from_numpy(labels_T).to(where)[None],
        starts=tuple(starts.tolist()),
        sequences=packed_sequences(padded, where, unpadded=own),
        source_BS=torch.where(real_BS, torch.from_numpy(starts).to(where)[:, None] + places_S, 0),
        real_BS=real_BS,
    )
