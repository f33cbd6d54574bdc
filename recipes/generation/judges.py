"""The driver's handle on the judges that the run starts: real vLLM engines, each served under one address.

    an engine dies, or does not answer    its actor is ended and another one started at the same address; questions that
                                          come meanwhile wait, go to another copy, or end without a verdict
    it cannot be started again            the run says so and goes on: its environments are paused when too many of
                                          their rollouts end without a verdict

One thread watches all engines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import ray

from recipes.errors import EngineError
from recipes.generation.clients.failure import failure
from recipes.generation.judge_engine import JudgeActor

if TYPE_CHECKING:
    from recipes.config.keys.judges import StartedJudge
    from recipes.config.tree import DeadlinesConfig

logger = logging.getLogger(__name__)

WATCH_SECONDS = 5.0
SILENCE_SECONDS = 60.0  # beyond those, after which an actor counts as dead
ANSWER_SECONDS = 60.0  # for the first answer of a server that has just started
MAX_STARTS = 3  # in a row that fail, after which an engine stays away


class JudgeEngine:
    """One copy of a judge: it keeps its address, its actor is replaced when it dies."""

    def __init__(self, judge: StartedJudge, options: Mapping[str, Any], *, api_key: str, ports: tuple[int, int]):
        self.judge = judge
        self.url = ""
        self.num_starts = 0
        self.actor: Any = None
        self._remote = ray.remote(JudgeActor).options(**options)
        self._api_key, self._ports = api_key, ports

    def __str__(self) -> str:
        return f"judge {self.judge.name} at {self.url or 'no address yet'}"

    async def launch(self, deadline_seconds: float) -> None:
        """Create an actor and have it take an address, the present one if there is one."""
        self.num_starts += 1
        self.actor = self._remote.remote(self.judge, api_key=self._api_key, ports=self._ports)
        port = int(self.url.rpartition(":")[2].partition("/")[0]) if self.url else None
        url = await asyncio.wait_for(self.actor.hold_address.remote(port), deadline_seconds)
        if self.url and url != self.url:
            ray.kill(self.actor)
            raise EngineError(f"it was placed at {url}, where no environment would ask it")
        self.url = url

    async def load(self, deadline_seconds: float) -> None:
        """Wait until the model is loaded and the server says so at its address."""
        where = await asyncio.wait_for(self.actor.start.remote(), deadline_seconds)
        headers = {"authorization": f"Bearer {self._api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=ANSWER_SECONDS, trust_env=False) as client:
            answer = await client.get(f"{self.url}/models")
        served = [model["id"] for model in answer.json()["data"]] if answer.status_code == 200 else []
        if served != [self.judge.model]:
            raise EngineError(f"its server says {answer.status_code}: {answer.text[:200]}")
        logger.info("%s is up at %s", where, self.url)


class Judges:
    """All engines of all judges."""

    def __init__(self, engines: Sequence[JudgeEngine], api_key: str, deadlines: DeadlinesConfig) -> None:
        self._engines, self._deadlines = engines, deadlines
        self.api_key = api_key
        self._watchers: list[concurrent.futures.Future[None]] = []  # kept: a loop holds its tasks weakly
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    @classmethod
    def launch(
        cls,
        judges: Sequence[StartedJudge],
        *,
        placement: Sequence[Mapping[str, Any]],
        ports: tuple[int, int],
        deadlines: DeadlinesConfig,
    ) -> Judges:
        """Create one actor per copy of each judge, in order, and return once all have an address.

        `placement` has the options of each actor, `ports` is the half-open range of the servers' ports. Raises
        `EngineError` when an actor fails or is late. The models load after `load` is called.
        """
        api_key = os.environ.get("VLLM_API_KEY") or secrets.token_hex(32)
        copies = [judge for judge in judges for _ in range(judge.num_copies)]
        engines = [
            JudgeEngine(judge, options, api_key=api_key, ports=ports)
            for judge, options in zip(copies, placement, strict=True)
        ]
        started = cls(engines, api_key, deadlines)
        seconds = deadlines.placement
        started._all(*(engine.launch(seconds) for engine in engines), seconds=seconds)
        return started

    def addresses(self) -> dict[str, list[str]]:
        """Return the base URLs of every judge by the name of its instance."""
        found: dict[str, list[str]] = {}
        for engine in self._engines:
            found.setdefault(engine.judge.name, []).append(engine.url)
        return found

    def load(self) -> None:
        """Load all models and begin to watch them; raises `EngineError` as soon as one fails or is late."""
        seconds = self._deadlines.engine_start
        self._all(*(engine.load(seconds) for engine in self._engines), seconds=seconds)
        self._watchers = [asyncio.run_coroutine_threadsafe(self._watch(one), self._loop) for one in self._engines]

    def shutdown(self) -> None:
        """Stop all engines, by force when they do not stop within the deadline."""
        asyncio.run_coroutine_threadsafe(_end_watching(), self._loop)
        self._thread.join(timeout=self._deadlines.shutdown)
        actors = [engine.actor for engine in self._engines if engine.actor is not None]
        calls = [actor.shutdown.remote() for actor in actors]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=self._deadlines.shutdown)
        for actor in actors:
            ray.kill(actor)

    def _all(self, *calls: Any, seconds: float) -> None:
        """Run one coroutine per engine; the first that fails ends the wait and all actors."""

        async def one(engine: JudgeEngine, call: Any) -> None:
            try:
                await call
            except Exception as error:
                raise failure(str(engine), error, seconds) from error

        async def together() -> None:
            await asyncio.gather(*map(one, self._engines, calls))

        try:
            asyncio.run_coroutine_threadsafe(together(), self._loop).result()
        except EngineError:
            self.shutdown()
            raise

    async def _watch(self, engine: JudgeEngine) -> None:
        """Replace the actor of an engine whenever it fails, until it cannot be started again."""
        while True:
            try:
                while True:
                    await asyncio.wait_for(engine.actor.watch.remote(WATCH_SECONDS), WATCH_SECONDS + SILENCE_SECONDS)
            except Exception as error:  # whatever it is, the engine cannot be relied on
                logger.warning("%s", failure(str(engine), error, WATCH_SECONDS + SILENCE_SECONDS))
            if not await self._restart(engine):
                return

    async def _restart(self, engine: JudgeEngine) -> bool:
        for attempt in range(1, MAX_STARTS + 1):
            ray.kill(engine.actor)
            try:
                await engine.launch(self._deadlines.placement)
                await engine.load(self._deadlines.engine_start)
            except Exception as error:
                reason = failure(str(engine), error, self._deadlines.engine_start)
                logger.warning("start %d of %d failed: %s", attempt, MAX_STARTS, reason)
            else:
                return True
        ray.kill(engine.actor)
        logger.error("%s stays away after %d failed starts; its questions get no reply", engine, MAX_STARTS)
        return False


async def _end_watching() -> None:
    """Cancel all tasks of this loop, let them end, and stop the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()
