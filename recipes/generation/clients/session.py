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

import numpy as np

from recipes.generation.requests import ID_BYTES, InSession, to_bytes
from recipes.types import Completion

_numbers: Iterator[int] = itertools.count()  # of the sessions of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one call."""

    token_ids: bytes  # int32, all of them
    num_kept: int = 0  # leading tokens that the engine has from the call before
    session: Session | None = None  # None: it is sent without one

    def place(self, engine: int, *, is_lost: bool) -> InSession | None:
        """Return what to tell an engine of the session; `is_lost` says that it has not got the session's tokens."""
        if self.session is None:
            return None
        if is_lost or engine != self.session.engine:
            return InSession(number=self.session.number)
        return InSession(number=self.session.number, after=self.session.after, num_kept=self.num_kept)


@dataclass(slots=True, eq=False)
class Session:
    """The calls of one rollout. Use it on one event loop."""

    number: int = field(default_factory=lambda: next(_numbers))
    engine: int | None = None  # that has the tokens of the call before
    after: int | None = None  # id of the request of that call
    _seen: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # prompt and answer of that call
    _seen_ids: bytes = b""  # both as int32
    _num_calls: int = 0
    _is_open: bool = False  # a call is not answered yet

    def begin(self, token_ids: tuple[int, ...]) -> Prompt:
        """Return the prompt of the next call; `end_call` must follow if it has a session."""
        self._num_calls += 1
        if self._num_calls == 1 or self._is_open:
            return Prompt(token_ids=to_bytes(token_ids))
        self._is_open = True
        prompt, answer = self._seen
        length = len(prompt) + len(answer)
        # Fast, since mostly these are the same objects. Joined, they would be copied once more in every turn.
        if token_ids[len(prompt) : length] == answer and token_ids[: len(prompt)] == prompt:
            return Prompt(token_ids=self._seen_ids + to_bytes(token_ids[length:]), num_kept=length, session=self)
        whole = to_bytes(token_ids)
        return Prompt(token_ids=whole, num_kept=num_shared(self._seen_ids, whole), session=self)

    def answered(
        self, token_ids: tuple[int, ...], prompt: Prompt, completion: Completion, *, at: tuple[int, int]
    ) -> None:
        """Note the answer of a call that has the session; `at` is the engine and the id of the request."""
        self._seen = (token_ids, completion.token_ids)
        self._seen_ids = prompt.token_ids + to_bytes(completion.token_ids)
        self.engine, self.after = at

    def end_call(self) -> None:
        """Note that the call is over, answered or not."""
        self._is_open = False


def num_shared(first: bytes, second: bytes) -> int:
    """Return how many leading int32 values two arrays share."""
    size = min(len(first), len(second)) // ID_BYTES
    differs = np.frombuffer(first, np.int32, size) != np.frombuffer(second, np.int32, size)
    return int(differs.argmax()) if differs.any() else size
