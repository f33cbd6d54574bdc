"""What a rollout has said to its engine, so that each turn sends only its new tokens. Imports no Ray.

The first call of a rollout goes without a session, since most rollouts have no second one. The second call brings its
whole prompt, and the engine keeps prompt and answer. Each later call names the call before it and sends only what
follows behind the tokens that both prompts share. A call beside another of its rollout brings its whole prompt.

All tokens are here, too. When the engine has lost them, or another engine takes over, the whole prompt is sent again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from recipes.generation.serving.requests import InSession
from recipes.token_ids import TokenIds
from recipes.types import Completion

_numbers: Iterator[int] = itertools.count()  # of the sessions of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPrompt:
    """The prompt of one call."""

    token_ids: TokenIds
    num_kept: int = 0  # leading tokens that the engine has from the call before
    session: EngineSession | None = None  # None: it is sent without one

    def place(self, engine: int, *, is_lost: bool) -> tuple[bytes, InSession | None]:
        """Return the tokens to send to an engine and their session; `is_lost` says that it has not got the rest."""
        session = self.session
        if session is None:
            return self.token_ids.to_bytes(), None
        if is_lost or engine != session.engine:
            return self.token_ids.to_bytes(), InSession(number=session.number)
        new_ids = self.token_ids.to_bytes(self.num_kept)
        return new_ids, InSession(number=session.number, after=session.after, num_kept=self.num_kept)


@dataclass(slots=True, eq=False)
class EngineSession:
    """The calls of one rollout. Use it on one event loop."""

    number: int = field(default_factory=lambda: next(_numbers))
    engine: int | None = None  # that has the tokens of the call before
    after: int | None = None  # id of the request of that call
    _seen: TokenIds = field(default_factory=TokenIds)  # prompt and answer of the call before
    _num_calls: int = 0
    _is_open: bool = False  # a call is not answered yet

    def begin(self, token_ids: TokenIds) -> SentPrompt:
        """Return the prompt of the next call; `answered` or `failed` must follow if it has a session."""
        self._num_calls += 1
        if self._num_calls == 1 or self._is_open:
            return SentPrompt(token_ids=token_ids)
        self._is_open = True
        return SentPrompt(token_ids=token_ids, num_kept=token_ids.num_shared(self._seen), session=self)

    def answered(self, token_ids: TokenIds, completion: Completion, *, engine: int, request_id: int) -> None:
        """Note the answer of the open call, whose prompt was `token_ids`."""
        self._is_open = False
        self._seen = token_ids.plus(completion.token_ids)
        self.engine, self.after = engine, request_id

    def failed(self, token_ids: TokenIds) -> None:
        """Note that the open call, whose prompt was `token_ids`, has no answer: what the engine has is unknown."""
        self._is_open = False
        self._seen = token_ids
        self.engine = None
