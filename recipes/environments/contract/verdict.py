"""What a verifier says about one response: a verdict with its reason, or the fact that there is none.

A missing verdict is a value of its own and never becomes a number: a rollout without a verdict has no reward, does
not enter its group's statistics and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.types import RolloutStatus

Response = Mapping[str, Any]
"""A Responses object: `output` is a list of `message`, `reasoning` and `function_call` items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward and why; raises `ValueError` for a reward that is not finite."""

    reward: float
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)  # numeric extras, averaged per agent in the logs
    details: Mapping[str, str | None] = field(default_factory=dict)  # what was read from the answer, for logs
    is_flagged: bool = False  # the environment asks to keep the rollout out of the loss

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite, got {self.reward} ({self.reason})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoVerdict:
    """The environment failed; `status` says which part of it."""

    status: RolloutStatus
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An answer that is scored together with those of its group, once all of them are there."""

    response: Response


def env_failed(reason: str) -> NoVerdict:
    """Return that the environment itself failed, and why."""
    return NoVerdict(status=RolloutStatus.ENV_FAILED, reason=reason)
