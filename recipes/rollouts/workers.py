"""The driver's handle on the rollout workers: each prompt goes to one of them, and a worker that dies is replaced.

What happens when something fails:

    a worker           dies, or is silent for        its groups begin again on the others, or on the new actor that
                       `SILENCE_SECONDS`             starts in its place; engines drop what it has asked
    a prompt           has lost `MAX_WORKERS_LOST`   its rollouts are aborted: it may be what kills them
    a start            of a worker fails             it is tried again, on the next node; the run begins when enough
                                                     workers are up, and those that are slow take groups later
    all workers        cannot be started again       `run_group` raises `RunError`

Groups run on the event loop of the collector, starts on one of their own.

A worker's scoring processes and its sandbox end with it. The finished groups of a dead worker stay: the driver owns
their objects, and the node's object store keeps them. When the node dies as well, the collector has them sampled again.

The actor that runs rollouts: codec, agents, verifiers' clients and scoring processes, on one event loop.

It samples on the engines directly. A finished group leaves it as two objects: the headers, which the driver reads, and
the tokens, which lie in the object store until a rank of the policy fetches them. The driver owns both, so they outlive
this process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from recipes.cluster.placement import ActorOptions, node_of
from recipes.cluster.starts import NUM_DEADLINES, BackgroundLoop, Starts, wrong_input
from recipes.cluster.token_store import RayTokenStore, room_for
from recipes.config.keys.derive import derive
from recipes.config.tree import Config
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.swe.containers import places
from recipes.errors import RecipeError, RunError
from recipes.generation.clients.client import FollowingClient, OpenEngines
from recipes.generation.clients.failure import failure
from recipes.rollouts.group import GroupRequest, GroupRunner, StoredGroup, without_answer
from recipes.rollouts.teachers import Teachers
from recipes.tokens import GroupTokens, pack_rollouts, store_rollouts
from recipes.types import RolloutHeader, RolloutStatus

MAX_WARNINGS = 20  # that travel with one group; a warning of every rollout would be many
_SHOWN_CHARACTERS = 2000  # of one


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """What the driver reads of a finished group."""

    headers: tuple[RolloutHeader, ...]
    warnings: list[str]  # of the worker, since its last report


class Warnings(logging.Handler):
    """Keeps what this process warns of until the driver takes it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < MAX_WARNINGS:
            self._lines.append(self.format(record)[:_SHOWN_CHARACTERS])

    def take(self) -> list[str]:
        """Return what has been kept since the last call."""
        taken, self._lines = self._lines, []
        return taken


class RolloutWorker:
    """A Ray actor. Every method is a coroutine on the actor's one event loop."""

    def __init__(self, config: Config, *, name: str, num_workers: int, num_on_node: int) -> None:
        """`name` is this process's own among all that sample.

        `num_workers` share the limits of the judges, and `num_on_node` of them the cores of this machine.
        """
        logging.basicConfig(level=logging.WARNING)
        self._warnings = Warnings()
        logging.getLogger("recipes").addHandler(self._warnings)
        cfg = config.policy.generation
        self._environments = Environments.from_config(
            config.env, ChatCodec.from_config(config.policy), num_sharers=num_workers, num_on_node=num_on_node
        )
        self._engines = FollowingClient(
            name,
            derive(config).num_engines,
            max_model_len=cfg.vllm_cfg.max_model_len,
            deadline_seconds=config.deadlines.generation,
        )
        self._teachers = Teachers.from_config(config, num_sharers=num_workers)
        self._judges_number = -1
        self._groups = GroupRunner(
            sampler=self._engines,
            runner=self._environments,
            max_model_len=cfg.vllm_cfg.max_model_len,
            rollout_seconds=config.deadlines.rollout,
            teachers=self._teachers,
        )

    async def ping(self) -> None:
        """Return when the event loop comes to it."""

    async def follow(self, engines: OpenEngines) -> None:
        """Sample on these engines from now on."""
        self._engines.follow(engines)

    async def ask_judges_at(self, number: int, addresses: Mapping[str, Sequence[str]]) -> None:
        """Ask judges and teachers, by name, at these addresses, unless a later call has come before."""
        if number > self._judges_number:
            self._judges_number = number
            self._environments.ask_judges_at(addresses)
            if self._teachers is not None:
                self._teachers.ask_at(addresses)

    async def run_group(self, request: GroupRequest) -> tuple[GroupReport, GroupTokens]:
        """Return what the driver is told of a group, and its tokens; raises `EngineError` when no engine is left."""
        headers, tokens = pack_rollouts(await self._groups.run(request))
        return GroupReport(headers=headers, warnings=self._warnings.take()), tokens

    async def close(self) -> None:
        """End the scoring processes, the sandbox and the connections; remove the containers' files."""
        await asyncio.to_thread(self._environments.close)
        await asyncio.to_thread(places.leave)


logger = logging.getLogger(__name__)

MAX_WORKERS_LOST = 3
CHECK_SECONDS = 30.0  # without an answer to a group, after which its worker is asked whether it lives
NOTED_SECONDS = 5.0  # without an answer to that, from which a message of a stall names the worker
SILENCE_SECONDS = 120.0  # without an answer to that; one answer of a model never keeps the loop so long
_POLL_SECONDS = 0.1  # while no worker is up
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
        self.liveness = Liveness(None)  # of that actor
        self.num_starts = 0
        self.num_failed = 0  # starts, each of which moves it to the next node
        self.num_groups = 0  # in flight
        self.is_up = False
        self.told: Any = None  # the call that tells it of the engines, until a group has waited for it

    def __str__(self) -> str:
        return f"rollout worker {self.index}"

    @property
    def name(self) -> str:
        """Return the name of the present actor, which no other has or had."""
        return f"rollout-worker-{self.index}.{self.num_starts}"


class RolloutWorkers:
    """All workers as one."""

    def __init__(self, config: Config, placement: Sequence[ActorOptions]) -> None:
        """Create one actor per entry of `placement` (options of a Ray actor); they start while others do."""
        self._config, self._placement = config, placement
        self._workers = [_Worker(index) for index in range(len(placement))]
        self._engines: Engines | None = None
        self._open = OpenEngines(number=-1)
        self._judges: tuple[int, Mapping[str, Sequence[str]]] = (0, {})  # how often addresses have come, and the last
        self._lock = threading.Lock()  # of `_open`, `_judges` and of the actors that were told
        self.num_lost = 0  # workers that died, in the whole run
        cfg = config.policy.generation
        self.starts = Starts(list(map(str, self._workers)), max_starts=cfg.max_starts, min_share=cfg.min_share_up)
        self._background = BackgroundLoop("rollout workers")
        for worker in self._workers:
            self._launch(worker)

    def connect(self, engines: Engines) -> None:
        """Wait until enough workers are up and know `engines`; raises what `Starts.wait` does when too few are.

        A worker's calls may overtake each other: one that is up before it has heard of an engine could not sample.
        """
        self._engines = engines
        engines.subscribe(self._tell)
        for worker in self._workers:
            self.starts.watch(str(worker), self._start(worker), self._background.loop)
        self.starts.wait(NUM_DEADLINES * self._config.deadlines.engine_start)

    def ask_judges_at(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Have every worker ask the judges at these addresses, by their names; called by any thread."""
        with self._lock:
            self._judges = (self._judges[0] + 1, addresses)
            for worker in self._workers:
                worker.actor.ask_judges_at.remote(*self._judges)

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

    def silent(self) -> dict[str, str]:
        """Return since when each worker that was asked whether it lives has said nothing, where that is long."""
        seconds = {str(worker): worker.liveness.silent_seconds() for worker in self._workers if worker.is_up}
        return {name: f"has not answered for {since:.0f} s" for name, since in seconds.items() if since > NOTED_SECONDS}

    def close(self) -> None:
        """End all workers, by force when they do not end within the deadline."""
        self._background.end(self._config.deadlines.shutdown)
        calls = [worker.actor.close.remote() for worker in self._workers if worker.is_up]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=self._config.deadlines.shutdown)
        for worker in self._workers:
            ray.kill(worker.actor)

    def _place_of(self, worker: _Worker) -> ActorOptions:
        return self._placement[(worker.index + worker.num_failed) % len(self._placement)]

    def _launch(self, worker: _Worker) -> None:
        worker.num_starts += 1
        place = self._place_of(worker)
        remote = ray.remote(RolloutWorker).options(**place, max_concurrency=_CALLS_AT_ONCE)
        node = _node_of(place)
        actor = remote.remote(
            self._config,
            name=worker.name,
            num_workers=len(self._workers),
            num_on_node=sum(_node_of(options) == node for options in self._placement),
        )
        with self._lock:
            worker.actor, worker.liveness, worker.told = actor, Liveness(actor), None
            if self._judges[0]:
                actor.ask_judges_at.remote(*self._judges)

    def _tell(self, engines: OpenEngines) -> None:
        """Tell every worker which engines are open; called by any thread."""
        with self._lock:
            if engines.number > self._open.number:
                self._open = engines
                for worker in self._workers:
                    worker.told = worker.actor.follow.remote(engines)

    async def _least_busy(self) -> _Worker:
        """Return the worker with the fewest groups; wait for one while all are being started again."""
        while not (up := [worker for worker in self._workers if worker.is_up]):
            if self.starts.are_all_away:
                raise RunError(f"no rollout worker is left: {len(self._workers)} died and could not be started again")
            await asyncio.sleep(_POLL_SECONDS)
        return min(up, key=lambda worker: worker.num_groups)

    async def _run_on(self, worker: _Worker, request: GroupRequest) -> StoredGroup:
        """Run a group on a worker; raises `_WorkerLostError` when that dies."""
        actor, liveness, number = worker.actor, worker.liveness, worker.num_starts
        worker.num_groups += 1
        call = None
        try:
            await self._has_been_told(worker, liveness)
            call, tokens = actor.run_group.options(num_returns=2).remote(request)
            with room_for(f"a group of {worker}"):
                report: GroupReport = await liveness.result(call)
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

    async def _has_been_told(self, worker: _Worker, liveness: Liveness) -> None:
        """Wait until a worker knows which engines are open: a group may overtake the call that says so."""
        if (told := worker.told) is not None:
            await liveness.result(told)
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
        self.starts.lost(str(worker), lost)
        logger.warning("%s; its %d groups begin again", lost, worker.num_groups)
        self.starts.watch(str(worker), self._restart(worker), self._background.loop)

    async def _restart(self, worker: _Worker) -> None:
        self._launch(worker)
        await self._start(worker)

    async def _start(self, worker: _Worker) -> None:
        """Have the new actor of a worker know the engines, and another when that fails, while starts are tried."""
        seconds = self._config.deadlines.engine_start
        while True:
            try:
                await asyncio.wait_for(worker.actor.follow.remote(self._open), seconds)
            except Exception as error:
                ray.kill(worker.actor)
                reason = failure(str(worker), error, seconds)
                node = await asyncio.to_thread(node_of, self._place_of(worker))
                if not self.starts.failed(str(worker), reason, node=node, wrong=wrong_input(error)):
                    return
                worker.num_failed += 1
                self._launch(worker)
                continue
            worker.is_up = True
            self.starts.succeeded(str(worker))
            if worker.num_starts > 1:
                logger.info("%s has been started again", worker)
            return


def _node_of(options: ActorOptions) -> str | None:
    """Return the node that an actor with these options is to run on; None where all share one."""
    return getattr(options.get("scheduling_strategy"), "node_id", None)


class Liveness:
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

    def silent_seconds(self) -> float:
        """Return for how long a ping has had no answer; called by any thread."""
        is_open = self._ping is not None and not self._ping.done()
        return time.monotonic() - self._asked_at if is_open else 0.0

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
