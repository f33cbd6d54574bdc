"""A client of all engines: requests in, completions out. Each rollout worker has one, and so has the driver.

The driver alone decides which engines take requests: it starts them, pushes weights to them and replaces them. It tells
the other clients by `OpenEngines`. A client has one connection to each engine, through which requests go and answers
come. When it breaks, the client connects again; its requests go to other engines or, where none is left, wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recipes.errors import EngineError
from recipes.generation.clients.failure import failure
from recipes.generation.clients.router import SILENCE_SECONDS, EngineSession, EngineStream, Router
from recipes.generation.serving.requests import ClientMessage, EngineAddress, Request
from recipes.types import Completion, Sampling

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 1.0  # between two attempts

EngineKey = tuple[int, int]
"""Number of an engine, and how often it was started: another actor of one engine has another key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngines:
    """Which engines take requests at one moment."""

    number: int = 0  # a larger one is newer
    addresses: Mapping[EngineKey, EngineAddress] = field(default_factory=dict)
    closed: Mapping[int, str] = field(default_factory=dict)  # why the others take none, by number


class EngineClient:
    """Samples on the engines that are open. `name` tells this client from all others that the engines have had."""

    def __init__(self, name: str, num_engines: int, *, max_model_len: int, deadline_seconds: float) -> None:
        self.name = name
        self.router = Router(num_engines, send=self._send, abort=self._abort)
        self._max_model_len = max_model_len
        self.deadline_seconds = deadline_seconds  # of a request that is sent from now on
        self._streams: dict[int, EngineStream] = {}  # to the actors that run the engines now, or ran them last

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        affinity: int,
        sample: tuple[int, ...] = (),
        session: EngineSession | None = None,
    ) -> Completion:
        """Sample one completion.

        `affinity` is the number of the prompt; `sample` tells this request from others for the same prompt, and begins
        with the number of the rollout. With the run's seed and the prompt they determine the random numbers of the
        request, whichever engine samples it. With a `session`, only tokens that are new since its last call are sent.
        Raises `RequestError` when the request fails or is late, `EngineError` when no engine is left.
        """
        if len(prompt_token_ids) >= self._max_model_len:
            raise ValueError(
                f"prompt has {len(prompt_token_ids)} tokens; with policy.generation.vllm_cfg.max_model_len"
                f" {self._max_model_len} it must be shorter than that"
            )
        return await self.router.generate(prompt_token_ids, sampling, affinity=affinity, sample=sample, session=session)

    def end(self, session: EngineSession) -> None:
        """Let the engine forget the tokens of a rollout that is over."""
        if session.engine is not None:
            self._streams[session.engine].send(ClientMessage(ended_sessions=(session.number,)))

    def attach(self, engine: int, address: EngineAddress, loop: asyncio.AbstractEventLoop) -> EngineStream:
        """Have an engine's requests sent to an actor that has started; `pass_on` must follow, on `loop`."""
        stream = self._streams[engine] = EngineStream(self.name, address, loop)
        self.router.mend(engine)
        return stream

    async def reconnect(self, engine: int) -> None:
        """Make a connection that has broken again, in one attempt; raises `EngineError` when that fails."""
        stream = self._streams[engine].again()
        await stream.connect()
        self._streams[engine] = stream
        self.router.mend(engine)

    def open(self, engine: int) -> None:
        """Send requests to an engine from now on. One that is open stays as it is."""
        self.router.open(engine)

    async def pass_on(self, engine: int) -> None:
        """Hand over the answers of an engine for as long as its connection lasts.

        Raises what ends it: no answer of that connection can be had any more. The caller must then cut or close the
        engine in the router, so that its requests are sampled elsewhere.
        """
        stream = self._streams[engine]
        try:
            await stream.connect()
            while True:
                self.router.deliver(engine, await stream.answers())
        finally:
            stream.close()

    async def pass_on_again(self, engine: int) -> None:
        """Hand over the answers of an engine until it is dead: a connection that breaks is made again, once each time.

        Raises what has ended it. The caller must then close the engine in the router.
        """
        while True:
            try:
                await self.pass_on(engine)
            except TimeoutError:  # the engine is silent
                raise
            except (OSError, EOFError) as broken:
                self._cut(engine, broken)
                await asyncio.sleep(RECONNECT_SECONDS)
                try:
                    await self.reconnect(engine)
                except EngineError:
                    raise broken from None

    def _cut(self, engine: int, broken: Exception) -> None:
        reason = failure(f"generation engine {engine}", broken, SILENCE_SECONDS)
        num_moved = self.router.cut(engine, str(reason))
        logger.warning("%s; %d requests are sampled again", reason, num_moved)

    def _send(self, engine: int, requests: Sequence[Request]) -> None:
        message = ClientMessage(requests=tuple(requests), deadline_seconds=self.deadline_seconds)
        self._streams[engine].send(message)

    def _abort(self, engine: int, request_id: int) -> None:
        self._streams[engine].send(ClientMessage(aborted=(request_id,)))


class FollowingClient(EngineClient):
    """A client that is told which engines are open. Use it on one event loop."""

    def __init__(self, name: str, num_engines: int, *, max_model_len: int, deadline_seconds: float) -> None:
        super().__init__(name, num_engines, max_model_len=max_model_len, deadline_seconds=deadline_seconds)
        self._seen = -1
        self._keys: dict[int, EngineKey] = {}  # of the engines that the driver has opened
        self._watching: dict[int, asyncio.Task[None]] = {}
        for engine in range(num_engines):
            self.router.close(engine, f"generation engine {engine} is not known yet")

    def follow(self, engines: OpenEngines) -> None:
        """Open and close engines as the driver says; what is older than what was said last changes nothing."""
        if engines.number <= self._seen:
            return
        self._seen = engines.number
        said = {key[0]: key for key in engines.addresses}
        for engine, key in list(self._keys.items()):
            if said.get(engine) != key:
                self._close(engine, engines.closed.get(engine, f"generation engine {engine} was started again"))
        loop = asyncio.get_running_loop()
        for engine, key in said.items():
            if self._keys.get(engine) != key:
                self._keys[engine] = key
                self.attach(engine, engines.addresses[key], loop)
                self.open(engine)
                self._watching[engine] = loop.create_task(self._watch(engine))

    def _close(self, engine: int, reason: str) -> None:
        del self._keys[engine]
        self._watching.pop(engine).cancel()
        self.router.close(engine, reason)

    async def _watch(self, engine: int) -> None:
        """Pass on the answers of an engine until the driver closes it; connect again whenever the connection breaks.

        When its actor has died the driver sees that as well, and closes it.
        """
        while True:
            try:
                await self.pass_on(engine)
            except Exception as error:
                self._cut(engine, error)
            await self._connect_again(engine)
            self.open(engine)

    async def _connect_again(self, engine: int) -> None:
        """Connect, whenever that is; requests do not wait for it longer than `SILENCE_SECONDS`."""
        end = time.monotonic() + SILENCE_SECONDS
        while True:
            await asyncio.sleep(RECONNECT_SECONDS)
            try:
                return await self.reconnect(engine)
            except Exception as error:  # whatever it is: nobody else would connect to it again
                if time.monotonic() > end:
                    self.router.close(engine, str(error))
