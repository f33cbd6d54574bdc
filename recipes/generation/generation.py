"""The driver's handle on all engines: requests in, completions out, weights pushed to all at once.

What happens when something fails:

    a request        is late or fails in vLLM       `generate` raises `RequestError`; its rollout fails, the run goes on
    a connection     to an engine breaks            it is made again; its requests go to other engines, or wait for that
    an engine        dies, is silent for            it is closed and its requests are sampled on the others; a new actor
                     `SILENCE_SECONDS`, or cannot   starts in its place, takes part in the next push and then requests
                     be reached
    a start          of an engine fails             it is tried again, where a place is free elsewhere; the run begins
                                                    when enough engines are up, and the others join at a push
    all engines      are closed                     `generate` and `update_weights` raise `EngineError`

One thread receives the answers of all engines. Its loops, one per engine:

    consumes                  waits for                             unblocked by
    the engine's messages     the next one, `SILENCE_SECONDS` long  a message, which comes every 2 s; the engine's death
    the engine's death        a new actor that can generate         its start, or `deadlines.engine_start`

One engine as the driver sees it: the actor that runs it now, and the totals of all actors that have run it.

`outcomes` waits for calls to several engines.

The dicts that prepare a weight transfer, as vLLM's weight-transfer API expects them. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from recipes.cluster.placement import ActorOptions, Place
from recipes.cluster.starts import NUM_DEADLINES, BackgroundLoop, Starts, wrong_input
from recipes.cluster.token_store import room_for
from recipes.errors import EngineError, RecipeError
from recipes.generation.clients.client import EngineClient, OpenEngines
from recipes.generation.clients.failure import failure
from recipes.generation.clients.router import SILENCE_SECONDS, EngineSession
from recipes.generation.engine import EngineActor, EngineInfo
from recipes.generation.serving.requests import AtPush, EngineAddress
from recipes.types import PUSH_BUCKET_BYTES, Completion, Sampling, WeightLayout

if TYPE_CHECKING:
    from recipes.config.tree import DeadlinesConfig, GenerationConfig


def shared_memory_init(layout: WeightLayout) -> dict[str, Any]:
    """Return the init info of the shared-memory transfer, the fields of `weight_transfer.SharedMemoryInit`."""
    return {
        "path": layout.path,
        "names": list(layout.names),
        "dtypes": list(layout.dtypes),
        "shapes": [list(shape) for shape in layout.shapes],
        "offsets": list(layout.offsets),
        "num_bytes": layout.num_bytes,
        "count_offset": layout.count_offset,
    }


def nccl_init(nccl_id: bytes, *, engine: int, num_engines: int, ranks_per_engine: int) -> dict[str, Any]:
    """Return the init info of vLLM's NCCL transfer for one engine; rank 0 is the policy, the engines follow.

    `nccl_id` are the 128 bytes of the id that the policy has made for this group.
    """
    return {
        "nccl_unique_id_b64": base64.b64encode(nccl_id).decode(),
        "rank_offset": 1 + engine * ranks_per_engine,
        "world_size": 1 + num_engines * ranks_per_engine,
        "packed": True,
        "packed_buffer_size_bytes": PUSH_BUCKET_BYTES,
    }


def nccl_update(layout: WeightLayout) -> dict[str, Any]:
    """Return the update info of vLLM's NCCL transfer: the tensors in the order of their broadcast."""
    return {
        "names": list(layout.names),
        "dtype_names": list(layout.dtypes),
        "shapes": [list(shape) for shape in layout.shapes],
    }


COUNTERS = (  # these only grow
    "busy_seconds",
    "update_seconds",
    "requests",
    "prompt_tokens",
    "cached_prompt_tokens",
    "generated_tokens",
)
GAUGES = ("running", "waiting")  # requests, at the moment


class EngineHandle:
    """An engine keeps its number; its actor is replaced when it dies."""

    def __init__(self, index: int, options: ActorOptions, make_actor: Callable[[int, ActorOptions], Any]) -> None:
        self.index = index
        self.name = f"generation engine {index}"
        self.actor: Any = None
        self.info: EngineInfo | None = None
        self.num_starts = 0
        self.is_up = False  # from the end of a start until a failure
        self.can_see_file = True  # whether it is on the host of the policy's shared-memory file
        self.place, self._make_actor = Place(options), make_actor
        self._past: dict[str, float] = {}  # totals of earlier actors
        self._latest: Mapping[str, float] = {}  # of the present one, when it was last asked

    def __str__(self) -> str:
        return str(self.info) if self.info else self.name

    @property
    def key(self) -> tuple[int, int]:
        """Engine and actor: another actor of the same engine has another key."""
        return self.index, self.num_starts

    @property
    def address(self) -> EngineAddress:
        """Where the actor that was started last takes requests."""
        assert self.info is not None, "the engine has not been started"
        return self.info.address

    def launch(self) -> Any:
        """Create a new actor and return the reference of its `EngineInfo`."""
        self.actor = self._make_actor(self.index, self.place.options)
        self.num_starts += 1
        self._past, self._latest = self.totals(None), {}
        return self.actor.start.remote()

    def started(self, info: EngineInfo) -> None:
        """Note that the actor can generate."""
        self.info, self.is_up = info, True
        self.place.was_good()

    def kill(self) -> None:
        """End the actor and its EngineCore process."""
        self.is_up = False
        if self.actor is not None:
            ray.kill(self.actor)

    def totals(self, latest: Mapping[str, float] | None) -> dict[str, float]:
        """Return the statistics over all actors, `latest` being those of the present one; None: it did not answer."""
        if latest is not None:
            self._latest = latest
        totals = {name: self._past.get(name, 0.0) + self._latest.get(name, 0.0) for name in COUNTERS}
        return totals | {name: (latest or {}).get(name, 0.0) for name in GAUGES}


def outcomes(
    calls: Mapping[EngineHandle, Any], deadline_seconds: float, *, stop_at_failure: bool = False
) -> dict[EngineHandle, Any]:
    """Wait for one call per engine; return the result or the `EngineError` of each, failures first.

    With `stop_at_failure` the first failure ends the wait, and calls that are not finished then have no entry.
    """
    end = time.monotonic() + deadline_seconds
    engines = {call: engine for engine, call in calls.items()}
    waiting = list(engines)
    results: dict[EngineHandle, Any] = {}
    errors: dict[EngineHandle, EngineError] = {}
    while waiting and not (errors and stop_at_failure):
        done, waiting = ray.wait(waiting, timeout=max(end - time.monotonic(), 0.0))
        for call in done or waiting:  # none is done: all that are left are late
            try:
                results[engines[call]] = ray.get(call, timeout=0)
            except Exception as error:
                errors[engines[call]] = failure(str(engines[call]), error, deadline_seconds)
        if not done:
            break
    return errors | results


logger = logging.getLogger(__name__)

STATS_SECONDS = 10.0


class Generation:
    """Engines as one. Methods block unless they are coroutines; all may be called from any thread.

    `at_push` says what becomes of running requests when weights are pushed; it may be set at any time.
    """

    def __init__(
        self, engines: Sequence[EngineHandle], *, cfg: GenerationConfig, deadlines: DeadlinesConfig, loads_weights: bool
    ) -> None:
        """Begin to start the engines that are not up."""
        vllm_cfg = cfg.vllm_cfg
        self.at_push = AtPush.KEEP
        names = [engine.name for engine in engines]
        self.starts = Starts(names, max_starts=cfg.max_starts, min_share=cfg.min_share_up)
        self._engines = engines
        self._ranks_per_engine = vllm_cfg.tensor_parallel_size * vllm_cfg.pipeline_parallel_size
        self._deadlines = deadlines
        self._client = EngineClient(
            "driver", len(engines), max_model_len=vllm_cfg.max_model_len, deadline_seconds=deadlines.generation
        )
        self._tell: list[Callable[[OpenEngines], None]] = []  # of the other clients
        self._told = OpenEngines()
        self._connected: frozenset[tuple[int, int]] = frozenset()  # keys of the engines that can receive weights
        self._layout: WeightLayout | None = None  # by which they do
        self._digest, self._is_nccl = "", False
        self._needs_push = not loads_weights  # before an engine that starts may sample
        self._background = BackgroundLoop("generation")
        self._loop = self._background.loop
        for engine in engines:
            if engine.is_up:
                self._client.attach(engine.index, engine.address, self._loop)
            else:
                self._client.router.close(engine.index, f"{engine} has not been started yet")
        self._push_lock = threading.Lock()
        self._state_lock = threading.Lock()  # of the engines' ups and downs
        for engine in engines:
            self.starts.watch(engine.name, self._watch(engine), self._loop)

    @classmethod
    def start(
        cls,
        cfg: GenerationConfig,
        *,
        model_path: str,
        seed: int,
        placement: Sequence[ActorOptions],
        deadlines: DeadlinesConfig,
        loads_weights: bool,
    ) -> Generation:
        """Start one engine per entry of `placement` (options of a Ray actor) and wait until enough are up.

        With `loads_weights` they read the weights of `model_path` and can generate. Without, they start faster, and
        until the first `update_weights` every request raises `EngineError`.
        Raises what `Starts.wait` does when fewer than `min_share_up` come up.
        """
        remote = ray.remote(EngineActor)

        def make_actor(index: int, options: ActorOptions) -> Any:
            return remote.options(**options).remote(
                cfg, index=index, model_path=model_path, seed=seed, loads_weights=loads_weights
            )

        engines = [EngineHandle(index, options, make_actor) for index, options in enumerate(placement)]
        generation = cls(engines, cfg=cfg, deadlines=deadlines, loads_weights=loads_weights)
        try:
            generation.starts.wait(NUM_DEADLINES * deadlines.engine_start)
        except RecipeError:
            generation.shutdown()
            raise
        return generation

    # -- weights ------------------------------------------------------------------------------------------------

    def needs_connect(self, layout: WeightLayout) -> bool:
        """Whether engines have died or come back since `connect_weights`, or it was called with another layout.

        Then it must be called before a push.
        """
        return frozenset(engine.key for engine in self._up()) != self._connected or layout != self._layout

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
        that are up then form a new NCCL group; a file is made known only to engines that do not know it yet. The names
        of the tensors are many: they go into the object store once, for all engines, and a push has only their digest.
        """
        with self._push_lock:
            up = self._up()
            self._digest = layout.digest
            with room_for("the names of the weights"):
                announced = ray.put((self._digest, {} if nccl_id is None else nccl_update(layout)))
            if nccl_id is None:
                known = self._connected if layout == self._layout else frozenset()
                new = [engine for engine in up if engine.key not in known]
                for engine in new:
                    engine.can_see_file = layout.host in ("", engine.info.node if engine.info else "")
                infos: list[Any] = [ray.put(shared_memory_init(layout))] * len(new)
            else:
                new = up
                infos = [
                    nccl_init(nccl_id, engine=n, num_engines=len(up), ranks_per_engine=self._ranks_per_engine)
                    for n in range(len(up))
                ]
            calls = {
                engine: engine.actor.connect_weights.remote(info, announced, is_copied=not engine.can_see_file)
                for engine, info in zip(new, infos, strict=True)
            }
            keys = {engine: engine.key for engine in up}
            failed = self._eject_failed(calls, self._deadlines.refit, stop_at_failure=nccl_id is not None)
            self._layout, self._is_nccl = layout, nccl_id is not None
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
        seconds, is_nccl = self._deadlines.refit, self._is_nccl
        update_info: dict[str, Any] = {}
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
                    self._digest,
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
            with room_for("the checksums of a push"):
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
        """Return each engine's running totals; for an engine that does not answer, its last known ones."""
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
        self._background.end(self._deadlines.shutdown)
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
            self.starts.lost(engine.name, error)
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
        """Start an engine, pass on its answers, and replace its actor whenever it fails."""
        while engine.is_up or await self._start(engine):
            key = engine.key
            try:
                await self._client.pass_on_again(engine.index)
            except Exception as error:  # whatever it is, this actor's answers can no longer be had
                self._eject(engine, key, failure(str(engine), error, SILENCE_SECONDS))

    async def _start(self, engine: EngineHandle) -> bool:
        """Start an actor, another when that fails, and return whether one is up in the end.

        The next push opens it, or its start does where nothing is ever pushed.
        """
        while True:
            try:
                info = await asyncio.wait_for(engine.launch(), self._deadlines.engine_start)
                await self._client.attach(engine.index, info.address, self._loop).connect()
            except Exception as error:
                engine.kill()
                reason = failure(engine.name, error, self._deadlines.engine_start)
                self._client.router.close(engine.index, str(reason))
                node = await asyncio.to_thread(engine.place.node)
                if not self.starts.failed(engine.name, reason, node=node, wrong=wrong_input(error)):
                    return False
                where = await asyncio.to_thread(engine.place.move)
                logger.info("%s is started again %s", engine.name, where)
                continue
            self._has_started(engine, info)
            return True

    def _has_started(self, engine: EngineHandle, info: EngineInfo) -> None:
        with self._state_lock:
            engine.started(info)
            if not self._needs_push:
                self._client.open(engine.index)
            elif engine.num_starts == 1:
                self._client.router.close(engine.index, f"{engine} has no weights before the first push")
        self._tell_clients()
        if engine.num_starts > 1:
            logger.info("%s has been started again", engine)
        else:
            logger.info("%s: import %.1f s, engine %.1f s", engine, info.import_seconds, info.engine_seconds)
        self.starts.succeeded(engine.name)
