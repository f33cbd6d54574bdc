"""The driver's handle on the rollout workers: each prompt goes to one of them, and a worker that dies is replaced.

What happens when something fails:

    a worker           dies, or is silent for        its groups begin again on the others, or on the new actor that
                       `SILENCE_SECONDS`             starts in its place; engines drop what it has asked
    a prompt           has lost `MAX_WORKERS_LOST`   its rollouts are aborted: it may be what kills them
    all workers        cannot be started again       `run_group` raises `RunError`

A worker's scoring processes and its sandbox end with it. The finished groups of a dead worker stay: the driver owns
their objects, and the node's object store keeps them. When the node dies as well, the collector has them sampled again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from recipes.cluster.token_store import RayTokenStore
from recipes.errors import RecipeError, RunError
from recipes.generation.clients.client import OpenEngines
from recipes.rollouts.group import GroupRequest, StoredGroup, without_answer
from recipes.rollouts.worker import GroupReport, RolloutWorker
from recipes.tokens import store_rollouts
from recipes.types import RolloutStatus

if TYPE_CHECKING:
    from recipes.config.tree import Config

logger = logging.getLogger(__name__)

MAX_WORKERS_LOST = 3
MAX_STARTS = 3  # in a row that fail, after which a worker stays away
CHECK_SECONDS = 30.0  # without an answer to a group, after which its worker is asked whether it lives
SILENCE_SECONDS = 120.0  # without an answer to that; one answer of a model never keeps the loop so long
_CALLS_AT_ONCE = 1 << 16  # of one actor: more than the groups that are ever in flight


class Engines(Protocol):
    """The part of `Generation` that the workers need."""

    def subscribe(self, tell: Any) -> None: ...

    def forget(self, client: str) -> None: ...


class _WorkerLostError(Exception):
    """The worker of a group has died; the message says which and how."""


class _Worker:
    """A worker keeps its number; its actor is replaced when it dies."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.actor: Any = None
        self.pulse = Pulse(None)  # of that actor
        self.num_starts = 0
        self.num_groups = 0  # in flight
        self.is_up = False
        self.restart: asyncio.Task[None] | None = None
        self.told: Any = None  # the call that tells it of the engines, until a group has waited for it

    def __str__(self) -> str:
        return f"rollout worker {self.index}"

    @property
    def name(self) -> str:
        """Return the name of the present actor, which no other has or had."""
        return f"rollout-worker-{self.index}.{self.num_starts}"


class RolloutWorkers:
    """All workers as one. `run_group` and what it calls run on one event loop, that of the collector."""

    def __init__(self, config: Config, placement: Sequence[dict[str, Any]]) -> None:
        """Create one actor per entry of `placement` (options of a Ray actor); they start while others do."""
        self._config, self._placement = config, placement
        self._workers = [_Worker(index) for index in range(len(placement))]
        self._engines: Engines | None = None
        self._open = OpenEngines(number=-1)
        self._lock = threading.Lock()  # of `_open` and of the actors that were told
        self.num_lost = 0  # workers that died, in the whole run
        for worker in self._workers:
            self._launch(worker)

    def connect(self, engines: Engines) -> None:
        """Wait until all workers are up and know `engines`; raises `RunError` when one does not start.

        A worker's calls may overtake each other: one that is up before it has heard of an engine could not sample.
        """
        seconds = self._config.deadlines.engine_start
        self._engines = engines
        engines.subscribe(self._tell)
        for worker in self._workers:
            try:
                ray.get(worker.actor.follow.remote(self._open), timeout=seconds)
            except RayError as error:
                cause = getattr(error, "cause", None) or error
                raise RunError(f"{worker} did not start: {type(cause).__name__}: {cause}") from error
            worker.is_up = True

    async def run_group(self, request: GroupRequest) -> StoredGroup:
        """Return the headers of a prompt's rollouts and where their tokens lie.

        Raises `EngineError` when no engine is left, `RunError` when no worker is. Cancelling ends the rollouts.
        """
        reason = ""
        for _ in range(MAX_WORKERS_LOST):
            worker = await self._least_busy()
            try:
                return await self._run_on(worker, request)
            except _WorkerLostError as lost:
                reason = f"{MAX_WORKERS_LOST} rollout workers died while they ran it, the last: {lost}"
        rollout = without_answer(RolloutStatus.ABORTED, reason)
        return store_rollouts([rollout] * request.num_rollouts, RayTokenStore())

    def close(self) -> None:
        """End all workers, by force when they do not end within the deadline."""
        calls = [worker.actor.close.remote() for worker in self._workers if worker.is_up]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=self._config.deadlines.shutdown)
        for worker in self._workers:
            ray.kill(worker.actor)

    def _launch(self, worker: _Worker) -> None:
        worker.num_starts += 1
        remote = ray.remote(RolloutWorker).options(**self._placement[worker.index], max_concurrency=_CALLS_AT_ONCE)
        node = _node_of(self._placement[worker.index])
        actor = remote.remote(
            self._config,
            name=worker.name,
            num_workers=len(self._workers),
            num_on_node=sum(_node_of(options) == node for options in self._placement),
        )
        with self._lock:
            worker.actor, worker.pulse, worker.told = actor, Pulse(actor), None

    def _tell(self, engines: OpenEngines) -> None:
        """Tell every worker which engines are open; called by any thread."""
        with self._lock:
            if engines.number > self._open.number:
                self._open = engines
                for worker in self._workers:
                    worker.told = worker.actor.follow.remote(engines)

    async def _least_busy(self) -> _Worker:
        """Return the worker with the fewest groups; wait for one while all are being started again."""
        while True:
            if up := [worker for worker in self._workers if worker.is_up]:
                return min(up, key=lambda worker: worker.num_groups)
            starting = [worker.restart for worker in self._workers if worker.restart and not worker.restart.done()]
            if not starting:
                raise RunError(f"no rollout worker is left: {len(self._workers)} died and could not be started again")
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)

    async def _run_on(self, worker: _Worker, request: GroupRequest) -> StoredGroup:
        """Run a group on a worker; raises `_WorkerLostError` when that dies."""
        actor, pulse, number = worker.actor, worker.pulse, worker.num_starts
        worker.num_groups += 1
        call = None
        try:
            await self._has_been_told(worker, pulse)
            call, tokens = actor.run_group.options(num_returns=2).remote(request)
            report: GroupReport = await pulse.result(call)
            for warning in report.warnings:
                logger.warning("%s: %s", worker, warning)
            return report.headers, tokens
        except asyncio.CancelledError:
            if call is not None:
                ray.cancel(call)
            raise
        except RayTaskError as failed:
            if isinstance(failed.cause, RecipeError):
                raise failed.cause from None
            raise RunError(f"{worker}: {type(failed.cause).__name__}: {failed.cause}") from failed
        except (ObjectStoreFullError, OutOfDiskError) as full:
            raise RunError(f"the object store takes no more groups, in memory or on its disk: {full}") from full
        except TimeoutError as silent:
            lost = _WorkerLostError(f"{worker} has not answered for {SILENCE_SECONDS:g} s")
            self._replace(worker, number, lost)
            raise lost from silent
        except RayError as error:
            lost = _WorkerLostError(f"{worker}: its process died ({type(error).__name__})")
            self._replace(worker, number, lost)
            raise lost from error
        finally:
            worker.num_groups -= 1

    async def _has_been_told(self, worker: _Worker, pulse: Pulse) -> None:
        """Wait until a worker knows which engines are open: a group may overtake the call that says so."""
        if (told := worker.told) is not None:
            await pulse.result(told)
            with self._lock:
                worker.told = worker.told if worker.told is not told else None

    def _replace(self, worker: _Worker, number: int, lost: _WorkerLostError) -> None:
        """End an actor that has failed, once, and begin to start another."""
        if worker.num_starts != number or not worker.is_up:
            return
        worker.is_up = False
        self.num_lost += 1
        ray.kill(worker.actor)
        if self._engines is not None:
            self._engines.forget(worker.name)
        logger.warning("%s; its %d groups begin again", lost, worker.num_groups)
        worker.restart = asyncio.get_running_loop().create_task(self._restart(worker))

    async def _restart(self, worker: _Worker) -> None:
        seconds = self._config.deadlines.engine_start
        for attempt in range(1, MAX_STARTS + 1):
            self._launch(worker)
            try:
                await asyncio.wait_for(worker.actor.follow.remote(self._open), seconds)
            except (RayError, TimeoutError) as error:
                ray.kill(worker.actor)
                logger.warning("%s: start %d of %d failed: %r", worker, attempt, MAX_STARTS, error)
                continue
            worker.is_up = True
            logger.info("%s has been started again", worker)
            return
        logger.error("%s stays away after %d failed starts", worker, MAX_STARTS)


def _node_of(options: dict[str, Any]) -> str | None:
    """Return the node that an actor with these options is to run on; None where all share one."""
    return getattr(options.get("scheduling_strategy"), "node_id", None)


class Pulse:
    """Whether one actor answers. All groups that run on it share its pings, since a step has hundreds of them."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked_at = 0.0
        self._ping: asyncio.Future[None] | None = None

    async def result(self, call: Any) -> Any:
        """Return the result of a call; raises `TimeoutError` when the actor is silent, and what the call raises."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answer}, timeout=CHECK_SECONDS))[0]:
                await asyncio.wait_for(asyncio.shield(self._latest_ping()), SILENCE_SECONDS)
            return answer.result()
        finally:
            answer.cancel()

    def _latest_ping(self) -> asyncio.Future[None]:
        is_old = time.monotonic() - self._asked_at >= CHECK_SECONDS
        if self._ping is None or (self._ping.done() and is_old):
            self._ping, self._asked_at = asyncio.ensure_future(self._actor.ping.remote()), time.monotonic()
            self._ping.add_done_callback(_note)
        return self._ping


def _note(ping: asyncio.Future[None]) -> None:
    """Look at the failure of a ping that nobody waits for any more, which asyncio would print."""
    if not ping.cancelled():
        ping.exception()
