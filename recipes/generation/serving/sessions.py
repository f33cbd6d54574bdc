"""The sessions of one engine: of each, prompt and answer of its last request are kept. Imports no vLLM and no Ray.

Only tokens are kept: what their KV may be used for is the matter of vLLM's prefix cache, which is keyed by weight
push. A session that is not there any more costs one whole prompt, so bounds are kept by dropping what was used least
recently. The sessions of an actor end with it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from recipes.generation.serving.requests import ID_BYTES, InSession, Request

MAX_TOKENS = 8 << 20  # of all sessions, about 44 bytes each: many times what an engine's KV cache holds
MAX_SESSIONS = 8192
IDLE_SECONDS = 3600.0  # without a request


@dataclass(frozen=True, slots=True)
class Tokens:
    """The same tokens twice: vLLM takes a list, and making one of an array is what costs most in a long session.

    They belong to one request at a time, which may change them in place.
    """

    ids: bytearray  # int32
    values: list[int]

    @classmethod
    def of(cls, ids: bytes) -> Tokens:
        """Return the tokens of an array."""
        return cls(bytearray(ids), np.frombuffer(ids, np.int32).tolist())

    def cut(self, length: int) -> None:
        """Keep the first `length` of them."""
        del self.ids[length * ID_BYTES :], self.values[length:]

    def add(self, ids: bytes) -> None:
        """Put others behind them."""
        self.ids.extend(ids)
        self.values.extend(np.frombuffer(ids, np.int32).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptTokens:
    """What is known of one session."""

    after: int  # id of the request
    tokens: Tokens  # its prompt and its answer
    used: float


Key = tuple[str, int]  # client and number


class KeptSessions:
    """All sessions of one engine, those used last at the end. Use it on one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[Key, _KeptTokens] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, client: str, request: Request) -> Tokens | None:
        """Return the whole prompt of a request, which then owns it; None when the tokens it continues are not here.

        The session is not here until `keep` brings it back: one whose request fails is lost.
        """
        place = request.session
        if place is None or place.after is None:
            return Tokens.of(request.token_ids)
        kept = self._kept.get((client, place.number))
        if kept is None or kept.after != place.after or len(kept.tokens.values) < place.num_kept:
            return None
        self.end(client, place.number)
        kept.tokens.cut(place.num_kept)
        kept.tokens.add(request.token_ids)
        return kept.tokens

    def keep(self, client: str, request_id: int, place: InSession, tokens: Tokens) -> None:
        """Keep prompt and answer of a request for the next one of its session."""
        self.end(client, place.number)
        self._kept[client, place.number] = _KeptTokens(after=request_id, tokens=tokens, used=self._clock())
        self.num_tokens += len(tokens.values)
        self._drop_oldest()

    def end(self, client: str, number: int) -> None:
        """Forget a session; one that is not here is no error."""
        if kept := self._kept.pop((client, number), None):
            self.num_tokens -= len(kept.tokens.values)

    def forget(self, client: str) -> None:
        """Forget all sessions of a client."""
        for key in [key for key in self._kept if key[0] == client]:
            self.end(*key)

    def _drop_oldest(self) -> None:
        too_old = self._clock() - IDLE_SECONDS
        while self._kept:
            oldest, kept = next(iter(self._kept.items()))
            if len(self._kept) <= MAX_SESSIONS and self.num_tokens <= MAX_TOKENS and kept.used >= too_old:
                return
            self.end(*oldest)
