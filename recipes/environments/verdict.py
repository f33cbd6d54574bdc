"""What a verifier says about one response: a verdict with its reason, or the fact that there is none.

No verdict is a value of its own. It is never turned into a number: a rollout without a verdict has no
reward, does not enter its group's statistics and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from recipes.types import RolloutStatus, Row

Response = Mapping[str, Any]
"""A Responses object: `output` is a list of `message`, `reasoning` and `function_call` items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward and why."""

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


class VerifierModule(Protocol):
    """The two functions a verifier module has. Both are pure."""

    @staticmethod
    def parse_task(row: Row, settings: Mapping[str, Any]) -> Any:
        """Return the verifier's frozen Task; raises `ValueError` naming the field, what was got and expected."""

    @staticmethod
    def score(response: Response, task: Any) -> Verdict:
        """Score one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """One entry of the registry."""

    module: ModuleType | VerifierModule
    class_name: str  # of the server, in its session cookie
    rewards: tuple[float, float]  # smallest and largest reward it can give
    settings: frozenset[str] = frozenset()  # keys its server configuration may set
    imports: tuple[str, ...] = ()  # what a scoring worker imports before its first score
    is_cheap: Callable[[Any], bool] = lambda _task: False  # bounded time on any text: scored here, without a worker

    def parse_task(self, row: Row, settings: Mapping[str, Any]) -> Any:
        """Read the verifier's fields of one row; raises `ValueError`."""
        return self.module.parse_task(row, settings)

    def score(self, response: Response, task: Any) -> Verdict:
        """Score one response in this process."""
        verdict: Verdict = self.module.score(response, task)
        return verdict
