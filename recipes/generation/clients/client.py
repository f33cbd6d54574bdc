"""A client of all engines: requests in, completions out. Each rollout worker has one, and so has the driver.

The driver alone decides which engines take requests: it starts them, pushes weights to them and replaces them. It tells
the other clients by `OpenEngines`. A client fetches its own answers, one call per open engine at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.generation.clients.failure import failure
from recipes.generation.clients.router import Router
from recipes.generation.clients.session import EngineSession
from recipes.generation.serving.requests import Request
from recipes.types import Completion, Sampling

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # without an answer, after which an engine tells its load

EngineKey = tuple[int, int]
"""Number of an engine, and how often it was started: another actor of one engine has another key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngines:
    """Which engines take requests at one moment."""

    number: int = 0  # a larger one is newer
    actors: Mapping[EngineKey, Any] = field(default_factory=dict)
    closed: Mapping[int, str] = field(default_factory=dict)  # why the others take none, by number


class EngineClient:
    """Samples on the engines that are open. `name` tells this client from all others that the engines have had."""

    def __init__(self, name: str, num_engines: int, *, max_model_len: int, deadline_seconds: float) -> None:
        self.name = name
        self.router = Router(num_engines, send=self._send, abort=self._abort)
        self._max_model_len = max_model_len
        self.deadline_seconds = deadline_seconds  # of a request that is sent from now on
        self._actors: dict[int, Any] = {}  # that run the engines now, or ran them last

    async def generate(
        self,
        prompt_token_ids: tuple[int, ...],
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
            self._actors[session.engine].end_session.options(num_returns=0).remote(self.name, session.number)

    def open(self, engine: int, actor: Any) -> None:
        """Send requests to an engine from now on."""
        self._actors[engine] = actor
        self.router.open(engine)

    async def fetch(self, engine: int, actor: Any, wait_seconds: float) -> None:
        """Pass on the answers of an engine that are ready, or come within `wait_seconds`.

        Raises what the call of the actor raises: no answer of that actor can be had any more.
        """
        self.router.deliver(engine, await actor.answers.remote(self.name, wait_seconds))

    def _send(self, engine: int, requests: Sequence[Request]) -> None:
        submit = self._actors[engine].submit.options(num_returns=0)
        submit.remote(self.name, requests, self.deadline_seconds)

    def _abort(self, engine: int, request_id: int) -> None:
        self._actors[engine].abort.options(num_returns=0).remote(self.name, request_id)


class FollowingClient(EngineClient):
    """A client that is told which engines are open. Use it on one event loop."""

    def __init__(self, name: str, num_engines: int, *, max_model_len: int, deadline_seconds: float) -> None:
        super().__init__(name, num_engines, max_model_len=max_model_len, deadline_seconds=deadline_seconds)
        self._seen = -1
        self._keys: dict[int, EngineKey] = {}  # of the engines that are open
        self._fetching: dict[int, asyncio.Task[None]] = {}
        for engine in range(num_engines):
            self.router.close(engine, f"generation engine {engine} is not known yet")

    def follow(self, engines: OpenEngines) -> None:
        """Open and close engines as the driver says; what is older than what was said last changes nothing."""
        if engines.number <= self._seen:
            return
        self._seen = engines.number
        said = {key[0]: key for key in engines.actors}
        for engine, key in list(self._keys.items()):
            if said.get(engine) != key:
                self._close(engine, engines.closed.get(engine, f"generation engine {engine} was started again"))
        for engine, key in said.items():
            if self._keys.get(engine) != key:
                self._keys[engine] = key
                self.open(engine, engines.actors[key])
                self._fetching[engine] = asyncio.get_running_loop().create_task(self._watch(key, engines.actors[key]))

    def _close(self, engine: int, reason: str) -> None:
        del self._keys[engine]
        self._fetching.pop(engine).cancel()
        self.router.close(engine, reason)

    async def _watch(self, key: EngineKey, actor: Any) -> None:
        """Pass on the answers of an engine until its actor fails, which the driver then sees as well."""
        engine = key[0]
        try:
            while True:
                await self.fetch(engine, actor, POLL_SECONDS)
        except Exception as error:
            if self._keys.get(engine) == key:
                del self._keys[engine]
                reason = failure(f"generation engine {engine}", error, POLL_SECONDS)
                num_moved = self.router.close(engine, str(reason))
                logger.warning("%s; %d requests are sampled elsewhere", reason, num_moved)
