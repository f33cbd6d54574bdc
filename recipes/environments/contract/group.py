"""A verifier that scores the answers of one group together: what it declares, and how it asks its judge.

It differs from a `Verifier` in what it is given: all answers to one prompt. It is a generator that yields questions
like a verifier with a judge (`asking.py`), but is sent `NoReply` where a question had none: one comparison that fails
costs only the answers that have no other. Whoever drives it bounds the time of the whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.contract.asking import JudgeQuestion
from recipes.environments.contract.verdict import NoVerdict, Response, Verdict
from recipes.environments.contract.verifier import Agent
from recipes.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReply:
    """A question that was not answered, and why."""

    reason: str


GroupScoring = Generator[Sequence[JudgeQuestion], Sequence[Response | NoReply], list[Verdict | NoVerdict]]
"""The verdicts of a group in progress, one per answer in the order of the answers. Replies come in the order of the
questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerifier:
    """One verifier of groups: its functions, how rows reach it, and what it needs to run."""

    parse_task: Callable[[Row, Mapping[str, Any]], Any]
    """Read the verifier's fields of a row, under its settings. Raises `ValueError` that names the field, what was got
    and what is expected."""
    score: Callable[[Sequence[Response], Any], GroupScoring]
    """Score the answers to one task. It takes little time on any text, since it runs beside all other rollouts."""
    judge: str  # the judge's name in the settings of its server: `<judge>_model_server`
    agents: Mapping[str, Agent]  # agent names of rows that need no configuration
    seconds: float  # for one group, unless its server says otherwise
    concurrency: int  # questions asked at the same time, of all groups together
    settings: frozenset[str] = frozenset()  # keys that the configuration of its server may set
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # instance name -> settings
    needs_judge: Callable[[Mapping[str, Any]], bool] = lambda _settings: True
