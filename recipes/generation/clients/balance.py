"""Which engine a request goes to: the one with the least work left, but siblings and turns stay together. Pure.

The work of an engine is the number of tokens that its unanswered requests may still take: prompt and longest answer. Of
its own requests a client knows it exactly. Engines tell it that of the other clients with their answers: else each
client would fill the engines that the others have filled.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container

from recipes.generation.serving.requests import Request

OVERLOAD = 2.0
"""An engine is overloaded for a group when its work for other prompts is more than this many times the other engines'
mean work: enough that uneven answers move no group, and far below what an engine beside idle ones has."""
_MAX_HOMES = 1 << 17  # remembered, the latest used: many times the prompts and rollouts that are in flight at once

Home = tuple[int, ...]  # a prompt, or a prompt and one of its rollouts


class Balance:
    """The work of each engine. Not safe for threads: the router calls it under its lock."""

    def __init__(self, num_engines: int) -> None:
        self.work = [0] * num_engines  # tokens of this client's requests
        self.work_of_others = [0] * num_engines  # tokens of the other clients' requests, as the engine said last
        self._of_prompt: Counter[tuple[int, int]] = Counter()  # work by engine and prompt; no entry is 0
        self._homes: OrderedDict[Home, int] = OrderedDict()  # the engine that sampled it last, the latest used last

    def place(self, request: Request, closed: Container[int]) -> int | None:
        """Choose an engine that is not `closed` and add the request to its work; None when all are closed.

        A later turn of a rollout goes where its earlier turns went, whose KV is there. A sibling goes where the group
        is, so that the prompt is computed once, unless that engine is overloaded. Everything else goes to the engine
        with the least work.
        """
        prompt, rollout = (request.affinity,), (request.affinity, *request.sample[:1])
        engine = self._homes.get(rollout)
        if engine is None or engine in closed:
            engine = self._homes.get(prompt)
            if engine is None or engine in closed or self._is_overloaded(engine, request.affinity, closed):
                engine = self._least(request.affinity, closed)
        if engine is None:
            return None
        self._remember(prompt, engine)
        self._remember(rollout, engine)
        self._add(engine, request, 1)
        return engine

    def release(self, engine: int, request: Request) -> None:
        """Take a request off the work of the engine that `place` chose; once for each `place`."""
        self._add(engine, request, -1)

    def _add(self, engine: int, request: Request, sign: int) -> None:
        tokens = sign * request.work
        self.work[engine] += tokens
        self._of_prompt[engine, request.affinity] += tokens
        if not self._of_prompt[engine, request.affinity]:
            del self._of_prompt[engine, request.affinity]

    def _load(self, engine: int) -> int:
        return self.work[engine] + self.work_of_others[engine]

    def _is_overloaded(self, engine: int, affinity: int, closed: Container[int]) -> bool:
        others = (other for other in range(len(self.work)) if other != engine and other not in closed)
        elsewhere = [self._load(other) for other in others]
        here = self._load(engine) - self._of_prompt.get((engine, affinity), 0)
        return bool(elsewhere) and here * len(elsewhere) > OVERLOAD * sum(elsewhere)

    def _least(self, affinity: int, closed: Container[int]) -> int | None:
        """Return the open engine with the least work; of equal ones, prompts take turns."""
        size = len(self.work)
        engines = (engine for engine in range(size) if engine not in closed)
        return min(engines, key=lambda engine: (self._load(engine), (engine - affinity) % size), default=None)

    def _remember(self, home: Home, engine: int) -> None:
        self._homes[home] = engine
        self._homes.move_to_end(home)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
