"""What every verifier module declares: one `VERIFIER`, which says all that the rest of the project knows of it.

A module in `verifiers/` has the same parts in the same order: a docstring (the task, the reward, every decision that
a reader might not expect), a frozen `Task`, `parse_task`, a pure `score`, and `VERIFIER` at the end. A Task's fields
are JSON values with tuples in place of lists, so that it can be hashed and sent to a scoring process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.contract.asking import Scoring
from recipes.environments.contract.tools import Tools
from recipes.environments.contract.verdict import Response, Verdict
from recipes.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """How rows of one agent name are run, and the server instance that scores them."""

    kind: str  # a key of environments.AGENT_KINDS; `by_url` for an agent elsewhere
    server: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # over those of the policy, under a row's own
    max_steps: int | None = None  # model calls of one rollout at most, for an agent that makes several
    url: str = ""  # of an agent elsewhere
    timeout_seconds: float = 0.0  # of one rollout of an agent elsewhere
    keeps_history: bool = True  # see `PromptBuilder.keeps_history`
    trains_main_only: bool = False  # of an agent elsewhere: see `sequences_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """One verifier: its functions, how rows reach it, and what it needs to run."""

    task: type  # the frozen dataclass that `parse_task` returns
    parse_task: Callable[[Row, Mapping[str, Any]], Any]
    """Read the verifier's fields of a row, under its settings. Raises `ValueError` that names the field, what was got
    and what is expected."""
    score: Callable[[Response, Any], Verdict | Scoring]
    """Score one response to a task. Pure; takes any response. A generator where it asks a judge or runs a program
    (`asking.py`)."""
    class_name: str  # of NeMo Gym's server, part of the name of its session cookie
    rewards: tuple[float, float]  # smallest and largest reward it can give
    agents: Mapping[str, Agent]  # agent names of rows that need no configuration
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of instances that need no configuration
    settings: frozenset[str] = frozenset()  # keys that the configuration of its server may set
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of NeMo Gym's server that have one value here; a configuration with another one is refused."""
    needs_judge: Callable[[Mapping[str, Any]], bool] = lambda _settings: False
    """Whether a server with these settings asks a judge, which its setting `judge_model_server` then names."""
    tools: Tools | None = None  # that the model can call during a rollout, beside the scoring
    needs_sandbox: bool = False  # whether it runs programs
    imports: tuple[str, ...] = ()  # libraries to load before the first score
    kind_of: Callable[[Any], str] = lambda _task: ""
    """Name the kind of a task, for `prepare`."""
    prepare: Callable[[str], None] = lambda _kind: None
    """Build and keep what scores of a kind of task share. It runs where no model text is seen; "" is every task."""
    is_cheap: Callable[[Any], bool] = lambda _task: False
    """Whether scoring a task takes little time on any text, so that it needs no scoring process."""

    @property
    def module(self) -> str:
        """The module that declares it, from which a scoring process loads it."""
        return self.score.__module__
