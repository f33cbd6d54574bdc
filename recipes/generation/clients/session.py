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

from recipes.generation.serving.requests import ID_BYTES, InSession, to_bytes
from recipes.types import Completion

_numbers: Iterator[int] = itertools.count()  # of the sessions of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPrompt:
    """The prompt of one call."""

    new_ids: bytes  # int32, all tokens, or what follows behind `num_kept`
    num_kept: int = 0  # leading tokens that the engine has from the call before
    session: EngineSession | None = None  # None: it is sent without one

    def place(self, engine: int, *, is_lost: bool) -> tuple[bytes, InSession | None]:
        """Return the tokens to send to an engine and their session; `is_lost` says that it has not got the rest."""
        session = self.session
        if session is None:
            return self.new_ids, None
        if is_lost or engine != session.engine:
            return bytes(session.seen_ids), InSession(number=session.number)
        return self.new_ids, InSession(number=session.number, after=session.after, num_kept=self.num_kept)


@dataclass(slots=True, eq=False)
class EngineSession:
    """The calls of one rollout. Use it on one event loop."""

    number: int = field(default_factory=lambda: next(_numbers))
    engine: int | None = None  # that has the tokens of the call before
    after: int | None = None  # id of the request of that call
    seen_ids: bytearray = field(default_factory=bytearray)  # int32, the prompt of the call that is open, else `_seen`
    _seen: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # prompt and answer of the call before
    _num_calls: int = 0
    _is_open: bool = False  # a call is not answered yet

    def begin(self, token_ids: tuple[int, ...]) -> SentPrompt:
        """Return the prompt of the next call; `answered` or `failed` must follow if it has a session."""
        self._num_calls += 1
        if self._num_calls == 1 or self._is_open:
            return SentPrompt(new_ids=to_bytes(token_ids))
        self._is_open = True
        prompt, answer = self._seen
        length = len(prompt) + len(answer)
        # Fast, since mostly these are the same objects. Joined, they would be copied once more in every turn.
        if token_ids[len(prompt) : length] == answer and token_ids[: len(prompt)] == prompt:
            num_kept, new_ids = length, to_bytes(token_ids[length:])
        else:
            whole = to_bytes(token_ids)
            num_kept = num_shared(bytes(self.seen_ids), whole)
            new_ids = whole[num_kept * ID_BYTES :]
        del self.seen_ids[num_kept * ID_BYTES :]
        self.seen_ids += new_ids
        return SentPrompt(new_ids=new_ids, num_kept=num_kept, session=self)

    def answered(self, token_ids: tuple[int, ...], completion: Completion, *, engine: int, request_id: int) -> None:
        """Note the answer of the open call, whose prompt was `token_ids`."""
        self._is_open = False
        self.seen_ids += to_bytes(completion.token_ids)
        self._seen = (token_ids, completion.token_ids)
        self.engine, self.after = engine, request_id

    def failed(self, token_ids: tuple[int, ...]) -> None:
        """Note that the open call, whose prompt was `token_ids`, has no answer: what the engine has is unknown."""
        self._is_open = False
        self._seen = (token_ids, ())
        self.engine = None


def num_shared(first: bytes, second: bytes) -> int:
    """Return how many leading int32 values two arrays share."""
    size = min(len(first), len(second)) // ID_BYTES
    differs = np.frombuffer(first, np.int32, size) != np.frombuffer(second, np.int32, size)
    return int(differs.argmax()) if differs.any() else size
