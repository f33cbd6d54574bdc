"""From headers to the rows of one optimizer step, and the masks that decide what enters the loss.

Shape suffix: B rollouts of the step. A mask removes; nothing adds back. The tokens stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        lengths_B=torch.tensor([max(rollout.num_tokens, 1) for rollout in rollouts]),
        sample_mask_B=sample_mask_B,
        rewards_B=rewards_B,
        advantages_B=torch.zeros(len(rollouts)),
    )
