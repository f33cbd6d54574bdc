"""Rollouts to the padded tensors of one optimizer step, and the masks that decide what enters the loss.

Shape suffixes: B rollouts, S padded length; entry [b, t] belongs to token t. A mask removes; nothing adds back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.types import Group, Rollout, RolloutStatus, TrainBatch, TurnSpan

Piece = tuple[Sequence[int], Sequence[float] | None]
"""Token ids of one span and their generation log-probabilities, or None when they were not sampled."""


def pad_turns(
    rows: Sequence[Sequence[Piece]], *, pad_token_id: int, divisible_by: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input_ids_BS, input_lengths_B, token_mask_BS (1 on sampled tokens), generation_logprobs_BS.

    S is the longest row rounded up to a multiple of `divisible_by`.
    """
    lengths = [sum(len(ids) for ids, _ in row) for row in rows]
    width = -(-max(lengths) // divisible_by) * divisible_by
    ids_BS = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    mask_BS = torch.zeros(len(rows), width)
    logprobs_BS = torch.zeros(len(rows), width)
    for b, row in enumerate(rows):
        start = 0
        for ids, logprobs in row:
            end = start + len(ids)
            ids_BS[b, start:end] = torch.tensor(ids, dtype=torch.int64)
            if logprobs is not None:
                mask_BS[b, start:end] = 1.0
                logprobs_BS[b, start:end] = torch.tensor(logprobs)
            start = end
    return ids_BS, torch.tensor(lengths, dtype=torch.int64), mask_BS, logprobs_BS


def sample_masks(
    base_B: Tensor, truncated: Sequence[bool], flagged: Sequence[bool], *, overlong_filtering: bool
) -> Tensor:
    """Return `base_B` with flagged samples, and truncated ones under `overlong_filtering`, set to 0."""
    removed = [flag or (overlong_filtering and cut) for cut, flag in zip(truncated, flagged, strict=True)]
    return base_B.masked_fill(torch.tensor(removed), 0.0)


def build_batch(
    groups: Sequence[Group],
    rewards_B: Tensor,
    *,
    pad_token_id: int,
    divisible_by: int,
    overlong_filtering: bool,
    mask_flagged: bool,
) -> TrainBatch:
    """Pad a step's groups into one batch of P * G rows; rows without a verdict stay, masked out."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = [len(group.rollouts) for group in groups]
    ids_BS, lengths_B, mask_BS, logprobs_BS = pad_turns(
        [_pieces(rollout, pad_token_id) for rollout in rollouts],
        pad_token_id=pad_token_id,
        divisible_by=divisible_by,
    )
    sample_mask_B = sample_masks(
        (~rewards_B.isnan()).float(),
        [rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts],
        [mask_flagged and rollout.is_flagged for rollout in rollouts],
        overlong_filtering=overlong_filtering,
    )
    return TrainBatch(
        input_ids_BS=ids_BS,
        input_lengths_B=lengths_B,
        token_mask_BS=mask_BS,
        sample_mask_B=sample_mask_B,
        generation_logprobs_BS=logprobs_BS,
        advantages_BS=torch.zeros_like(mask_BS),
        rewards_B=rewards_B,
        group_B=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)),
        turn_spans=tuple(span for row, rollout in enumerate(rollouts) for span in _spans(row, rollout)),
    )


def _pieces(rollout: Rollout, pad_token_id: int) -> list[Piece]:
    pieces: list[Piece] = []
    for turn in rollout.turns:
        pieces += [(turn.prompt_token_ids, None), (turn.token_ids, turn.logprobs)]
    return pieces or [((pad_token_id,), None)]  # a rollout that failed before its first token still has a row


def _spans(row: int, rollout: Rollout) -> list[TurnSpan]:
    spans, start = [], 0
    for turn in rollout.turns:
        start += len(turn.prompt_token_ids)
        end = start + len(turn.token_ids)
        spans.append(
            TurnSpan(
                row=row,
                start=start,
                end=end,
                is_invalid_tool_call=turn.is_invalid_tool_call,
                has_malformed_thinking=turn.has_malformed_thinking,
            )
        )
        start = end
    return spans
