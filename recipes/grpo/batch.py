"""From headers to the rows of one optimizer step, and the masks that decide what enters the loss.

Shape suffix: B rows of the step, which are rollouts, and at the end the sequences of rollouts. A mask removes; nothing
adds back. The tokens stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from recipes.types import Group, RolloutStatus, TrainBatch


def sample_masks(
    base_B: Tensor, truncated: Sequence[bool], flagged: Sequence[bool], *, overlong_filtering: bool
) -> Tensor:
    """Return `base_B` with flagged samples, and truncated ones under `overlong_filtering`, set to 0."""
    removed = [flag or (overlong_filtering and cut) for cut, flag in zip(truncated, flagged, strict=True)]
    return base_B.masked_fill(torch.tensor(removed), 0.0)


def build_batch(
    groups: Sequence[Group], rewards_B: Tensor, *, overlong_filtering: bool, mask_flagged: bool
) -> TrainBatch:
    """Return a step's P * G rows, groups in order; rows without a verdict stay, masked out."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = [len(group.rollouts) for group in groups]
    sample_mask_B = sample_masks(
        (~rewards_B.isnan()).float(),
        [rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts],
        [mask_flagged and rollout.is_flagged for rollout in rollouts],
        overlong_filtering=overlong_filtering,
    )
    return TrainBatch(
        tokens=tuple(group.tokens for group in groups),
        group_B=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)),
        member_B=torch.cat([torch.arange(size) for size in sizes]),
        lengths_B=torch.tensor([max(rollout.sequences[0][0], 1) for rollout in rollouts]),
        sample_mask_B=sample_mask_B,
        rewards_B=rewards_B,
        advantages_B=torch.zeros(len(rollouts)),
    )


def spread_over_sequences(batch: TrainBatch, groups: Sequence[Group], *, token_level_loss: bool) -> TrainBatch:
    """Return a step's rows with one row per sequence of each rollout, in order; equal when each rollout has one.

    Every sequence has the advantage, the reward and the mask of its rollout. A loss per token needs no more: each
    sampled token is in one row. In a loss per sample the unit is the rollout: a row counts by its share of the
    rollout's sampled tokens, `row_weight_B`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counts_B = torch.tensor([len(rollout.sequences) for rollout in rollouts])
    if not any(rollout.branches for rollout in rollouts):
        return batch
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    spread = replace(batch, **{name: value_B.repeat_interleave(counts_B, dim=0) for name, value_B in values.items()})
    weight_B = None
    if not token_level_loss:
        shares = [sampled / max(r.num_generated_tokens, 1) for r in rollouts for _, sampled in r.sequences]
        weight_B = torch.tensor(shares, dtype=torch.float32)
    return replace(
        spread,
        member_B=torch.cat([torch.arange(sum(len(r.sequences) for r in group.rollouts)) for group in groups]),
        lengths_B=torch.tensor([max(tokens, 1) for rollout in rollouts for tokens, _ in rollout.sequences]),
        rollout_B=torch.arange(len(rollouts)).repeat_interleave(counts_B),
        row_weight_B=weight_B,
    )
