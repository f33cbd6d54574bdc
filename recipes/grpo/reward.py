"""From the verdicts of a step's rollouts to one float64 reward per rollout. NaN marks "no verdict".

No failure is ever a reward: a rollout without a verdict of its environment or judge has NaN here. It is left out of its
group's statistics and of the loss, and is counted by its status.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.types import Group


def collect_rewards(groups: Sequence[Group]) -> Tensor:
    """Return rewards_B, float64, groups in order and rollouts in order within a group."""
    rewards = [
        rollout.reward if rollout.is_valid and rollout.reward is not None else torch.nan
        for group in groups
        for rollout in group.rollouts
    ]
    return torch.tensor(rewards, dtype=torch.float64)
