"""What the clients of one engine have asked, and the answers on their way to them. Imports no vLLM and no Ray.

A request that fails has its failure as its answer. When the engine has died, each client is told so instead.

Where the actor of an engine takes the connections of its clients. Imports no vLLM and no Ray.

The sessions of one engine: of each, prompt and answer of its last request are kept. Imports no vLLM and no Ray.

Only tokens are kept: what their KV may be used for is the matter of vLLM's prefix cache, which is keyed by weight
push. A session that is not there any more costs one whole prompt, so bounds are kept by dropping what was used least
recently. The sessions of an actor end with it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from recipes.cluster.http_limits import most_connections
from recipes.generation.serving.core_log import core_cause
from recipes.generation.serving.requests import (
    ID_BYTES,
    Answer,
    Answers,
    ClientMessage,
    EngineAddress,
    InSession,
    Request,
    Sample,
    admit,
    frame,
    read_frame,
    to_client_message,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0  # between two messages to a client at most: they show that the engine lives, and tell its load
_BACKLOG = 1024  # rollout workers that connect at once


class Listener:
    """Takes connections until `close`. It belongs to the event loop on which it was started."""

    def __init__(self, outstanding: OutstandingRequests, held: socket.socket) -> None:
        self._outstanding = outstanding
        self._server: asyncio.Server
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # who has not shown the key yet, the oldest first
        host, port = held.getsockname()[:2]
        self.address = EngineAddress(host=host, port=port, key=secrets.token_bytes(32))

    @classmethod
    async def start(cls, outstanding: OutstandingRequests, held: socket.socket) -> Listener:
        """Take connections on a socket that listens already."""
        listener = cls(outstanding, held)
        listener._server = await asyncio.start_server(listener._serve, sock=held, backlog=_BACKLOG)
        return listener

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the messages of one client until its connection ends. Who is not admitted leaves no trace."""
        try:
            if self._outstanding.is_dead:
                return
            with suppress(OSError, EOFError, TimeoutError, UnicodeDecodeError):
                name = await self._admit(reader, writer)
                await self._take_all(name, reader, writer)
        finally:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Return the name of a client that shows the key; of too many strangers the oldest is turned away."""
        while len(self._strangers) >= most_connections():
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            return await admit(reader, writer, self.address.key)
        finally:
            self._strangers.pop(writer, None)

    async def _take_all(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = self._outstanding.open(name, partial(_tell, writer))
        beat = asyncio.create_task(self._beat(asked, writer))
        try:
            while True:
                self._outstanding.take(asked, to_client_message(await read_frame(reader)))
        except msgspec.MsgspecError as error:  # it is of another version
            logger.warning("the connection of client %s ends, for it sent no message: %s", name, error)
        finally:
            beat.cancel()
            self._outstanding.close(asked)

    async def _beat(self, asked: ClientRequests, writer: asyncio.StreamWriter) -> None:
        """Tell the client now and then that the engine lives; once it is dead say so and end the connection."""
        died = self._outstanding.died
        while not self._outstanding.is_dead:
            self._outstanding.flush(asked)
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await died.wait()
        self._outstanding.flush(asked)
        _tell(writer, Answers(failure=self._outstanding.why_dead()))
        writer.close()


def _tell(writer: asyncio.StreamWriter, answers: Answers) -> None:
    if not writer.is_closing():
        writer.write(frame(answers))


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
class ClientRequests:
    """What one client has asked through one connection and not been told yet."""

    client: str
    tell: Callable[[Answers], None]
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # of unanswered requests, by request id
    answers: list[Answer] = field(default_factory=list)  # that leave in this tick of the event loop
    work: int = 0  # tokens that its unanswered requests may still take


class OutstandingRequests:
    """What the clients of one engine have asked and not been told yet. Use them on one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: dict[str, ClientRequests] = {}  # by client
        self.sessions = KeptSessions()
        self.died = asyncio.Event()  # set when a request has found the engine dead

    @property
    def is_dead(self) -> bool:
        """Whether the engine can answer nothing any more."""
        return self._engine.is_dead

    def why_dead(self) -> str:
        """Return what the clients of a dead engine are told."""
        return f"{self._engine} is dead: its EngineCore process ended: {core_cause()}"

    def open(self, client: str, tell: Callable[[Answers], None]) -> ClientRequests:
        """Begin with a client that has connected; what it asked through an earlier connection is dropped."""
        self.forget(client)
        asked = self._asked[client] = ClientRequests(client, tell)
        return asked

    def close(self, asked: ClientRequests) -> None:
        """End every request and every session of a client whose connection has ended."""
        if self._asked.get(asked.client) is asked:
            self.forget(asked.client)

    def forget(self, client: str) -> None:
        """End every request and every session of a client; one that is not known is no error."""
        self.sessions.forget(client)
        if asked := self._asked.pop(client, None):
            for task in asked.tasks.values():
                task.cancel()

    def take(self, asked: ClientRequests, message: ClientMessage) -> None:
        """Do what a client says.

        Each request is answered within its deadline, unless it is aborted, which gets no answer, or the engine dies.
        """
        for request in message.requests:
            task = asyncio.create_task(self._answer(asked, request, message.deadline_seconds))
            asked.tasks[request.id] = task
            asked.work += request.work
            task.add_done_callback(partial(_ended, asked, request))
        for request_id in message.aborted:
            if request_id in asked.tasks:
                asked.tasks[request_id].cancel()
        for number in message.ended_sessions:
            self.sessions.end(asked.client, number)

    def flush(self, asked: ClientRequests) -> None:
        """Tell a client its answers and the work of the others, also when there is no answer."""
        ready, asked.answers = asked.answers, []
        others = sum(other.work for other in self._asked.values()) - asked.work
        asked.tell(Answers(answers=tuple(ready), work_of_others=max(others, 0)))

    async def _answer(self, asked: ClientRequests, request: Request, deadline_seconds: float) -> None:
        """Sample one request and send its answer, whatever that is."""
        try:
            async with asyncio.timeout(deadline_seconds):
                answer = await self._sampled(asked.client, request)
        except TimeoutError:
            failure = f"{self._engine} did not answer within {deadline_seconds:g} s (deadlines.generation)"
            answer = Answer(id=request.id, failure=failure)
        except Exception as error:  # a value for the client: it concerns this request only, unless the engine is dead
            answer = Answer(id=request.id, failure=f"{self._engine}: {type(error).__name__}: {error}")
        if answer.sample is None and self._engine.is_dead:
            self.died.set()
            return
        if not asked.answers:
            asyncio.get_running_loop().call_soon(self.flush, asked)
        asked.answers.append(answer)

    async def _sampled(self, client: str, request: Request) -> Answer:
        prompt = self.sessions.take(client, request)
        if prompt is None:
            return Answer(id=request.id, is_session_lost=True)
        sample = await self._engine.sample(f"{client}/{request.id}", request, prompt)
        if request.session is not None:
            prompt.add(sample.token_ids)
            self.sessions.keep(client, request.id, request.session, prompt)
        return Answer(id=request.id, sample=sample)


def _ended(asked: ClientRequests, request: Request, task: asyncio.Task[None]) -> None:
    if asked.tasks.get(request.id) is task:  # else it was asked again, since its session was lost
        del asked.tasks[request.id]
    asked.work -= request.work
