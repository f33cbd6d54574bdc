"""What the clients of one engine have asked, and the answers that they have not fetched. Imports no vLLM and no Ray.

A request that fails has its failure as its answer. Only when the engine has died do calls raise.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from recipes.errors import EngineError
from recipes.generation.serving.requests import Answer, Answers, Request, Sample
from recipes.generation.serving.sessions import KeptSessions, Tokens

_GATHER_SECONDS = 0.005  # answers that come within this time travel together


class Engine(Protocol):
    """What samples. Its text says which engine it is."""

    @property
    def is_dead(self) -> bool:
        """Whether it can answer nothing any more."""
        ...

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        """Return one completion; cancelling ends its sampling. `name` is that of the request among all clients'."""
        ...


@dataclass(slots=True)
class Mailbox:
    """What one client has asked and not been told yet."""

    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # of unanswered requests, by request id
    answers: list[Answer] = field(default_factory=list)  # that the client has not fetched
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set when `answers` has something to return or raise
    work: int = 0  # tokens that its unanswered requests may still take


class Mailboxes:
    """The mailboxes of one engine. Use them on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._boxes: defaultdict[str, Mailbox] = defaultdict(Mailbox)  # by client
        self.sessions = KeptSessions()

    def submit(self, client: str, requests: Sequence[Request], deadline_seconds: float) -> None:
        """Begin to sample; each request is answered within its deadline, unless it is aborted."""
        box = self._boxes[client]
        for request in requests:
            task = asyncio.create_task(self._answer(client, box, request, deadline_seconds))
            box.tasks[request.id] = task
            box.work += request.work
            task.add_done_callback(partial(_ended, box, request))

    async def answers(self, client: str, wait_seconds: float) -> Answers:
        """Return the answers that are ready for a client, waiting up to `wait_seconds` for the first of them.

        Raises `EngineError` when the engine has died and the client has fetched all of its answers.
        """
        box = self._boxes[client]
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                await box.wake.wait()
                await asyncio.sleep(_GATHER_SECONDS)
        ready, box.answers = box.answers, []
        if self._engine.is_dead:
            if not ready:
                raise EngineError(f"{self._engine} is dead: its EngineCore process ended")
        else:
            box.wake.clear()
        others = sum(other.work for other in self._boxes.values()) - box.work
        return Answers(answers=tuple(ready), work_of_others=others)

    def abort(self, client: str, request_id: int) -> None:
        """End a request that nobody waits for; it gets no answer."""
        box = self._boxes.get(client)
        if box is not None and (task := box.tasks.get(request_id)):
            task.cancel()

    def forget(self, client: str) -> None:
        """End every request and every session of a client that has died."""
        self.sessions.forget(client)
        if box := self._boxes.pop(client, None):
            for task in box.tasks.values():
                task.cancel()

    async def _answer(self, client: str, box: Mailbox, request: Request, deadline_seconds: float) -> None:
        """Sample one request and keep its answer, whatever that is, for `answers`."""
        try:
            async with asyncio.timeout(deadline_seconds):
                answer = await self._sampled(client, request)
        except TimeoutError:
            failure = f"{self._engine} did not answer within {deadline_seconds:g} s (deadlines.generation)"
            answer = Answer(id=request.id, failure=failure)
        except Exception as error:  # a value for the client: it concerns this request only, unless the engine is dead
            answer = Answer(id=request.id, failure=f"{self._engine}: {type(error).__name__}: {error}")
        if answer.sample is not None or not self._engine.is_dead:
            box.answers.append(answer)
        box.wake.set()

    async def _sampled(self, client: str, request: Request) -> Answer:
        prompt = self.sessions.take(client, request)
        if prompt is None:
            return Answer(id=request.id, is_session_lost=True)
        sample = await self._engine.sample(f"{client}/{request.id}", request, prompt)
        if request.session is not None:
            prompt.add(sample.token_ids)
            self.sessions.keep(client, request.id, request.session, prompt)
        return Answer(id=request.id, sample=sample)


def _ended(box: Mailbox, request: Request, _: asyncio.Task[None]) -> None:
    del box.tasks[request.id]
    box.work -= request.work
