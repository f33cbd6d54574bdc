"""What the clients of one engine have asked, and the answers on their way to them. Imports no vLLM and no Ray.

A request that fails has its failure as its answer. When the engine has died, each client is told so instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from recipes.generation.serving.requests import Answer, Answers, ClientMessage, Request, Sample
from recipes.generation.serving.sessions import KeptSessions, Tokens


class Engine(Protocol):
    """What samples. Its text says which engine it is."""

    @property
    def is_dead(self) -> bool:
        """Whether it can answer nothing any more."""
        ...

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        """Return one completion; cancelling ends its sampling. `name` is that of the request among all clients'."""
        ...


@dataclass(slots=True, eq=False)
class Mailbox:
    """What one client has asked through one connection and not been told yet."""

    client: str
    tell: Callable[[Answers], None]
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # of unanswered requests, by request id
    answers: list[Answer] = field(default_factory=list)  # that leave in this tick of the event loop
    work: int = 0  # tokens that its unanswered requests may still take


class Mailboxes:
    """The mailboxes of one engine. Use them on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._boxes: dict[str, Mailbox] = {}  # by client
        self.sessions = KeptSessions()
        self.died = asyncio.Event()  # set when a request has found the engine dead

    @property
    def is_dead(self) -> bool:
        """Whether the engine can answer nothing any more."""
        return self._engine.is_dead

    def why_dead(self) -> str:
        """Return what the clients of a dead engine are told."""
        return f"{self._engine} is dead: its EngineCore process ended"

    def open(self, client: str, tell: Callable[[Answers], None]) -> Mailbox:
        """Begin with a client that has connected; what it asked through an earlier connection is dropped."""
        self.forget(client)
        box = self._boxes[client] = Mailbox(client, tell)
        return box

    def close(self, box: Mailbox) -> None:
        """End every request and every session of a client whose connection has ended."""
        if self._boxes.get(box.client) is box:
            self.forget(box.client)

    def forget(self, client: str) -> None:
        """End every request and every session of a client; one that is not known is no error."""
        self.sessions.forget(client)
        if box := self._boxes.pop(client, None):
            for task in box.tasks.values():
                task.cancel()

    def take(self, box: Mailbox, message: ClientMessage) -> None:
        """Do what a client says.

        Each request is answered within its deadline, unless it is aborted, which gets no answer, or the engine dies.
        """
        for request in message.requests:
            task = asyncio.create_task(self._answer(box, request, message.deadline_seconds))
            box.tasks[request.id] = task
            box.work += request.work
            task.add_done_callback(partial(_ended, box, request))
        for request_id in message.aborted:
            if request_id in box.tasks:
                box.tasks[request_id].cancel()
        for number in message.ended_sessions:
            self.sessions.end(box.client, number)

    def flush(self, box: Mailbox) -> None:
        """Tell a client its answers and the work of the others, also when there is no answer."""
        ready, box.answers = box.answers, []
        others = sum(other.work for other in self._boxes.values()) - box.work
        box.tell(Answers(answers=tuple(ready), work_of_others=max(others, 0)))

    async def _answer(self, box: Mailbox, request: Request, deadline_seconds: float) -> None:
        """Sample one request and send its answer, whatever that is."""
        try:
            async with asyncio.timeout(deadline_seconds):
                answer = await self._sampled(box.client, request)
        except TimeoutError:
            failure = f"{self._engine} did not answer within {deadline_seconds:g} s (deadlines.generation)"
            answer = Answer(id=request.id, failure=failure)
        except Exception as error:  # a value for the client: it concerns this request only, unless the engine is dead
            answer = Answer(id=request.id, failure=f"{self._engine}: {type(error).__name__}: {error}")
        if answer.sample is None and self._engine.is_dead:
            self.died.set()
            return
        if not box.answers:
            asyncio.get_running_loop().call_soon(self.flush, box)
        box.answers.append(answer)

    async def _sampled(self, client: str, request: Request) -> Answer:
        prompt = self.sessions.take(client, request)
        if prompt is None:
            return Answer(id=request.id, is_session_lost=True)
        sample = await self._engine.sample(f"{client}/{request.id}", request, prompt)
        if request.session is not None:
            prompt.add(sample.token_ids)
            self.sessions.keep(client, request.id, request.session, prompt)
        return Answer(id=request.id, sample=sample)


def _ended(box: Mailbox, request: Request, task: asyncio.Task[None]) -> None:
    if box.tasks.get(request.id) is task:  # else it was asked again, since its session was lost
        del box.tasks[request.id]
    box.work -= request.work
