"""The driver's handle on all engines: requests in, completions out, weights pushed to all at once.

What happens when something fails:

    a request        is late or fails in vLLM       `generate` raises `RequestError`; its rollout fails, the run goes on
    a connection     to an engine breaks            it is made again; its requests go to other engines, or wait for that
    an engine        dies, is silent for            it is closed and its requests are sampled on the others; a new actor
                     `SILENCE_SECONDS`, or cannot   starts in its place, takes part in the next push and then requests
                     be reached
    all engines      are closed                     `generate` and `update_weights` raise `EngineError`

One thread receives the answers of all engines. Its loops, one per engine:

    consumes                  waits for                             unblocked by
    the engine's messages     the next one, `SILENCE_SECONDS` long  a message, which comes every 2 s; the engine's death
    the engine's death        a new actor that can generate         its start, or `deadlines.engine_start`
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from recipes.errors import EngineError
from recipes.generation.clients.client import EngineClient, OpenEngines
from recipes.generation.clients.failure import failure
from recipes.generation.clients.session import EngineSession
from recipes.generation.clients.stream import SILENCE_SECONDS
from recipes.generation.engine import EngineActor, EngineInfo
from recipes.generation.handle import EngineHandle, outcomes
from recipes.generation.handshake import nccl_init, nccl_update, shared_memory_init
from recipes.generation.serving.requests import AtPush
from recipes.types import Completion, Sampling, WeightLayout

if TYPE_CHECKING:
    from recipes.config.tree import DeadlinesConfig, GenerationConfig, VllmConfig

logger = logging.getLogger(__name__)

STATS_SECONDS = 10.0
MAX_STARTS = 3  # in a row that fail, after which an engine stays closed


class Generation:
    """Engines as one. Methods block unless they are coroutines; all may be called from any thread.

    `at_push` says what becomes of running requests when weights are pushed; it may be set at any time.
    """

    def __init__(
        self, engines: Sequence[EngineHandle], *, vllm_cfg: VllmConfig, deadlines: DeadlinesConfig, loads_weights: bool
    ) -> None:
        self.at_push = AtPush.KEEP
        self._engines = engines
        self._ranks_per_engine = vllm_cfg.tensor_parallel_size * vllm_cfg.pipeline_parallel_size
        self._deadlines = deadlines
        self._client = EngineClient(
            "driver", len(engines), max_model_len=vllm_cfg.max_model_len, deadline_seconds=deadlines.generation
        )
        self._tell: list[Callable[[OpenEngines], None]] = []  # of the other clients
        self._told = OpenEngines()
        self._connected: frozenset[tuple[int, int]] = frozenset()  # keys of the engines that can receive weights
        self._update_info: dict[str, Any] = {}
        self._needs_push = not loads_weights  # before an engine that starts may sample
        self._loop = asyncio.new_event_loop()
        for engine in engines:
            self._client.attach(engine.index, engine.address, self._loop)
            if loads_weights:
                self._client.open(engine.index)
            else:
                self._client.router.close(engine.index, f"{engine} has no weights before the first push")
        self._push_lock = threading.Lock()
        self._state_lock = threading.Lock()  # of the engines' ups and downs
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._thread.start()
        for engine in engines:
            asyncio.run_coroutine_threadsafe(self._watch(engine), self._loop)

    @classmethod
    def start(
        cls,
        cfg: GenerationConfig,
        *,
        model_path: str,
        seed: int,
        placement: Sequence[dict[str, Any]],
        deadlines: DeadlinesConfig,
        loads_weights: bool,
    ) -> Generation:
        """Start one engine per entry of `placement` (options of a Ray actor) and wait until all are up.

        With `loads_weights` they read the weights of `model_path` and can generate. Without, they start faster, and
        until the first `update_weights` every request raises `EngineError`.
        Raises `EngineError` as soon as one of them fails or is late.
        """
        remote = ray.remote(EngineActor)

        def make_actor(index: int) -> Any:
            return remote.options(**placement[index]).remote(
                cfg, index=index, model_path=model_path, seed=seed, loads_weights=loads_weights
            )

        engines = [EngineHandle(index, make_actor) for index in range(len(placement))]
        calls = {engine: engine.launch() for engine in engines}
        for engine, outcome in outcomes(calls, deadlines.engine_start, stop_at_failure=True).items():
            if isinstance(outcome, EngineError):
                for other in engines:
                    other.kill()
                raise outcome
            engine.started(outcome)
            logger.info("%s: import %.1f s, engine %.1f s", engine, outcome.import_seconds, outcome.engine_seconds)
        return cls(engines, vllm_cfg=cfg.vllm_cfg, deadlines=deadlines, loads_weights=loads_weights)

    # -- weights ------------------------------------------------------------------------------------------------

    @property
    def needs_connect(self) -> bool:
        """Whether engines have died or come back since `connect_weights`, which must then be called before a push."""
        return frozenset(engine.key for engine in self._up()) != self._connected

    @property
    def num_ranks(self) -> int:
        """How many ranks the engines that are up add to the policy's NCCL group."""
        return len(self._up()) * self._ranks_per_engine

    @property
    def needs_weight_content(self) -> bool:
        """Whether an engine is on another host than the policy's shared-memory file."""
        return not all(engine.can_see_file for engine in self._up())

    def connect_weights(self, layout: WeightLayout, *, nccl_id: bytes | None = None) -> None:
        """Tell the engines how the policy sends its weights: by the layout's file, or by NCCL where one is given.

        With `nccl_id`, the id that the policy has made, this blocks until the policy has joined as rank 0. All engines
        that are up then form a new NCCL group; a file is made known only to engines that do not know it yet.
        """
        with self._push_lock:
            up = self._up()
            if nccl_id is None:
                self._update_info = {}
                new = [engine for engine in up if engine.key not in self._connected]
                for engine in new:
                    engine.can_see_file = layout.host in ("", engine.info.node if engine.info else "")
                infos = [shared_memory_init(layout)] * len(new)
            else:
                self._update_info, new = nccl_update(layout), up
                infos = [
                    nccl_init(nccl_id, engine=n, num_engines=len(up), ranks_per_engine=self._ranks_per_engine)
                    for n in range(len(up))
                ]
            calls = {
                engine: engine.actor.connect_weights.remote(info, is_copied=not engine.can_see_file)
                for engine, info in zip(new, infos, strict=True)
            }
            keys = {engine: engine.key for engine in up}
            failed = self._eject_failed(calls, self._deadlines.refit, stop_at_failure=nccl_id is not None)
            if failed and nccl_id is not None:  # the group is incomplete and cannot be used
                raise failed[0]
            self._connected = frozenset(key for engine, key in keys.items() if engine.is_up and engine.key == key)
            self._require_one(failed)

    def drain(self) -> None:
        """Where a push waits for running requests, wait until they have ended; `update_weights` must follow.

        Requests that come meanwhile, and those that have no place in the batch yet, are sampled after the push. An
        engine that fails is replaced; raises `EngineError` when none is left.
        """
        if self.at_push is not AtPush.DRAIN:
            return
        with self._push_lock:
            calls = {engine: engine.actor.drain.remote() for engine in self._up()}
            # Each request ends within its own deadline; the rest is for the engine to say so.
            deadline_seconds = self._deadlines.generation + self._deadlines.refit
            self._require_one(self._eject_failed(calls, deadline_seconds))

    def update_weights(self, version: int, content: Any = None, *, num_before: int | None = None) -> None:
        """Load the weights the policy has sent as `version`, on all engines at once; returns when all use them.

        `content` is a Ray reference to the bytes of the file, for the engines that do not see it. With `num_before`,
        how many tensors earlier pushes have written, the policy writes while this runs. An engine that fails is
        replaced; raises `EngineError` when none is left, or at the first failure where NCCL is used.
        """
        seconds, update_info, is_nccl = self._deadlines.refit, self._update_info, bool(self._update_info)
        if num_before is not None:
            seconds *= 2  # to write and to load: where the policy is late, its own error comes first
            update_info = {"num_before": num_before, "wait_seconds": seconds}
        with self._push_lock:
            with self._state_lock:
                self._needs_push = True
                keys = {engine: engine.key for engine in self._up() if engine.key in self._connected}
            calls = {
                engine: engine.actor.update_weights.remote(
                    version,
                    update_info,
                    None if engine.can_see_file else content,
                    keeps_caches=self.at_push is AtPush.KEEP,
                )
                for engine in keys
            }
            failed = self._eject_failed(calls, seconds, stop_at_failure=is_nccl)
            if failed and is_nccl:  # the others wait for it in the broadcast
                raise failed[0]
            with self._state_lock:
                for engine, key in keys.items():
                    if engine.is_up and engine.key == key:  # else it was started again and has not got these weights
                        self._client.open(engine.index)
            self._tell_clients()
            self._require_one(failed)

    def verify_weights(self, sent: Mapping[str, int]) -> None:
        """Compare what the engines received in the last push with what the policy sent, and replace those that differ.

        `sent` has the checksum of each tensor by its name. Raises `EngineError` when no engine is left.
        """
        with self._push_lock:
            stored = ray.put(dict(sent))
            up = [engine for engine in self._up() if engine.key in self._connected]
            calls = {engine: engine.actor.verify_weights.remote(stored) for engine in up}
            self._require_one(self._eject_failed(calls, self._deadlines.refit))

    # -- requests -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        affinity: int,
        sample: tuple[int, ...] = (),
        session: EngineSession | None = None,
    ) -> Completion:
        """Sample one completion; see `EngineClient.generate`."""
        client = self._client
        return await client.generate(prompt_token_ids, sampling, affinity=affinity, sample=sample, session=session)

    def end(self, session: EngineSession) -> None:
        """Let the engine forget the tokens of a rollout that is over."""
        self._client.end(session)

    def subscribe(self, tell: Callable[[OpenEngines], None]) -> None:
        """Tell another client which engines are open: now, and after each change. `tell` must not block."""
        with self._state_lock:
            self._tell.append(tell)
        self._tell_clients()
        tell(self._told)

    def forget(self, client: str) -> None:
        """End every request of a client that has died."""
        for engine in self._up():
            engine.actor.forget.options(num_returns=0).remote(client)

    def _tell_clients(self) -> None:
        """Tell the clients which engines are open, when this has changed."""
        with self._state_lock:
            closed = self._client.router.closed()
            addresses = {engine.key: engine.address for engine in self._engines if engine.index not in closed}
            if addresses.keys() == self._told.addresses.keys():
                return
            now = self._told = OpenEngines(number=self._told.number + 1, addresses=addresses, closed=closed)
            clients = list(self._tell)
        for tell in clients:
            tell(now)

    # -- what is known about the engines ------------------------------------------------------------------------

    @property
    def infos(self) -> list[EngineInfo]:
        """Where each engine runs, or ran last."""
        return [engine.info for engine in self._engines if engine.info]

    @property
    def num_engines(self) -> int:
        """How many engines the run has, dead or alive."""
        return len(self._engines)

    @property
    def num_engines_alive(self) -> int:
        """How many engines take requests: one that was started again does so only with the current weights."""
        return self._client.router.num_open()

    def stats(self) -> list[dict[str, float]]:
        """Return each engine's running totals; of an engine that does not answer, those that were known last."""
        calls = {engine: engine.actor.stats.remote() for engine in self._up()}
        found = outcomes(calls, STATS_SECONDS)
        return [
            engine.totals(latest if isinstance(latest := found.get(engine), Mapping) else None)
            for engine in self._engines
        ]

    def take_samples(self) -> list[dict[str, float]]:
        """Return what each engine's samples say since the last call; {} for one that does not answer or takes none.

        `EngineSamples.take` has the names.
        """
        found = outcomes({engine: engine.actor.take_samples.remote() for engine in self._up()}, STATS_SECONDS)
        samples = (found.get(engine) for engine in self._engines)
        return [dict(one) if isinstance(one, Mapping) else {} for one in samples]

    def servers(self) -> list[tuple[str, str]]:
        """Return the address and the key of the OpenAI-compatible server of each engine that is up."""
        infos = [engine.info for engine in self._up() if engine.info]
        return [(info.base_url, info.api_key) for info in infos if info.base_url and info.api_key]

    def shutdown(self) -> None:
        """Stop all engines, by force when they do not stop within the deadline."""
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout=self._deadlines.shutdown)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=self._deadlines.shutdown)
        calls = [engine.actor.shutdown.remote() for engine in self._up()]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=self._deadlines.shutdown)
        for engine in self._engines:
            engine.kill()

    # -- failures -----------------------------------------------------------------------------------------------

    def _up(self) -> list[EngineHandle]:
        return [engine for engine in self._engines if engine.is_up]

    def _eject(self, engine: EngineHandle, key: tuple[int, int], error: EngineError) -> None:
        """Close an engine and end its actor, once; `_watch` then starts another."""
        with self._state_lock:
            if engine.key != key or not engine.is_up:
                return
            engine.kill()
            self._client.router.close(engine.index, str(error))
        self._tell_clients()
        left = f"{len(self._up())} of {self.num_engines} engines are left"
        logger.warning("%s; its requests are sampled elsewhere; %s", error, left)

    def _eject_failed(
        self, calls: Mapping[EngineHandle, Any], deadline_seconds: float, *, stop_at_failure: bool = False
    ) -> list[EngineError]:
        """Wait for one call per engine, eject the engines whose call fails, and return the failures."""
        keys = {engine: engine.key for engine in calls}
        found = outcomes(calls, deadline_seconds, stop_at_failure=stop_at_failure)
        failed = {engine: outcome for engine, outcome in found.items() if isinstance(outcome, EngineError)}
        for engine, error in failed.items():
            self._eject(engine, keys[engine], error)
        return list(failed.values())

    def _require_one(self, failed: Sequence[EngineError]) -> None:
        if not self._up():
            reasons = [str(error) for error in failed] or self._client.router.closed().values()
            raise EngineError(f"no generation engine is left: {'; '.join(reasons)}")

    async def _watch(self, engine: EngineHandle) -> None:
        """Pass on the answers of one engine, and replace its actor whenever it fails."""
        while engine.is_up:
            key = engine.key
            try:
                await self._client.pass_on_again(engine.index)
            except Exception as error:  # whatever it is, this actor's answers can no longer be had
                self._eject(engine, key, failure(str(engine), error, SILENCE_SECONDS))
            await self._restart(engine)

    async def _restart(self, engine: EngineHandle) -> None:
        """Start a new actor. The next push opens it, or its start does where nothing is ever pushed."""
        for attempt in range(1, MAX_STARTS + 1):
            try:
                info = await asyncio.wait_for(engine.launch(), self._deadlines.engine_start)
                await self._client.attach(engine.index, info.address, self._loop).connect()
            except Exception as error:
                engine.kill()
                reason = failure(f"generation engine {engine.index}", error, self._deadlines.engine_start)
                logger.warning("start %d of %d failed: %s", attempt, MAX_STARTS, reason)
                continue
            with self._state_lock:
                engine.started(info)
                if not self._needs_push:
                    self._client.open(engine.index)
            self._tell_clients()
            logger.info("%s has been started again", engine)
            return
        logger.error("generation engine %d stays closed after %d failed starts", engine.index, MAX_STARTS)


async def _cancel_all() -> None:
    """End all tasks of the running loop, the caller's apart."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
