"""The driver's handle on all engines: requests in, completions out, weights pushed to all at once.

Requests that are made in one tick of an event loop travel to their engine as one call, whose answers stream back as
they come; those for the same prompt and sampling become one request with n samples: a group's G rollouts start
together, and the engine computes their common prompt once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from recipes.errors import EngineError
from recipes.generation.engine import Answer, EngineActor, EngineInfo, Request, Sample
from recipes.generation.handshake import nccl_init, nccl_update, shared_memory_init
from recipes.types import Completion, Sampling, VersionSpan, WeightLayout

if TYPE_CHECKING:
    from recipes.config.tree import DeadlinesConfig, GenerationConfig, VllmConfig

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # beyond a deadline that the actor itself keeps, before the driver gives the actor up
HEALTH_SECONDS = 10.0

Waiters = list[asyncio.Future[Completion]]
"""Who waits for the samples of one request."""


class Generation:
    """Engines as one. Methods block unless they are coroutines; all may be called from any thread."""

    def __init__(
        self, actors: Sequence[Any], infos: Sequence[EngineInfo], *, vllm_cfg: VllmConfig, deadlines: DeadlinesConfig
    ) -> None:
        self.infos = infos
        self._actors = actors
        self._max_model_len = vllm_cfg.max_model_len
        self._ranks_per_engine = vllm_cfg.tensor_parallel_size * vllm_cfg.pipeline_parallel_size
        self._deadlines = deadlines
        self._update_info: dict[str, Any] = {}
        self._sees_file = [True] * len(actors)
        self._update_lock = threading.Lock()
        self._request_ids = itertools.count()
        # Per event loop and engine: what this tick asks for.
        self._gathered: dict[
            tuple[asyncio.AbstractEventLoop, int], dict[tuple[tuple[int, ...], Sampling], Waiters]
        ] = {}
        self._calls: set[asyncio.Task[None]] = set()

    @classmethod
    def start(
        cls,
        cfg: GenerationConfig,
        *,
        model_path: str,
        seed: int,
        placement: Sequence[dict[str, Any]],
        deadlines: DeadlinesConfig,
    ) -> Generation:
        """Start one engine per entry of `placement` (options of a Ray actor) and wait until all can generate."""
        remote = ray.remote(EngineActor)
        actors = [
            remote.options(**options).remote(cfg, index=index, model_path=model_path, seed=seed)
            for index, options in enumerate(placement)
        ]
        names = [f"generation engine {index}" for index in range(len(actors))]
        try:
            infos: list[EngineInfo] = _collect(
                [actor.start.remote() for actor in actors], names, deadlines.engine_start
            )
        except EngineError:
            for actor in actors:
                ray.kill(actor)
            raise
        for info in infos:
            logger.info("%s: import %.1f s, engine %.1f s", info, info.import_seconds, info.engine_seconds)
        return cls(actors, infos, vllm_cfg=cfg.vllm_cfg, deadlines=deadlines)

    def connect_weights(self, layout: WeightLayout, *, rendezvous: tuple[str, int] | None = None) -> None:
        """Tell every engine how the policy sends its weights: by the layout's file, or by NCCL where one is given.

        With `rendezvous`, the policy's host and port, this blocks until the policy has joined as rank 0.
        """
        num_engines = len(self._actors)
        if rendezvous is None:
            self._update_info = {}
            infos = [shared_memory_init(layout)] * num_engines
            self._sees_file = [layout.host in ("", info.node) for info in self.infos]
        else:
            self._update_info = nccl_update(layout)
            infos = [
                nccl_init(rendezvous, engine=index, num_engines=num_engines, ranks_per_engine=self._ranks_per_engine)
                for index in range(num_engines)
            ]
        engines = zip(self._actors, infos, self._sees_file, strict=True)
        calls = [actor.connect_weights.remote(info, is_copied=not sees) for actor, info, sees in engines]
        self._collect(calls, self._deadlines.refit)

    @property
    def num_ranks(self) -> int:
        """How many ranks all engines together add to the policy's NCCL group."""
        return len(self._actors) * self._ranks_per_engine

    @property
    def needs_weight_content(self) -> bool:
        """Whether an engine is on another host than the policy's shared-memory file."""
        return not all(self._sees_file)

    def update_weights(self, version: int, content: Any = None) -> None:
        """Load the weights the policy has sent as `version`, on all engines at once; returns when all use them.

        `content` is a Ray reference to the bytes of the file, for the engines that do not see it.
        """
        with self._update_lock:
            calls = [
                actor.update_weights.remote(version, self._update_info, None if sees else content)
                for actor, sees in zip(self._actors, self._sees_file, strict=True)
            ]
            self._collect(calls, self._deadlines.refit)

    async def generate(self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, affinity: int) -> Completion:
        """Sample one completion on the engine that `affinity` picks; raises `EngineError` when it is dead or late."""
        if len(prompt_token_ids) >= self._max_model_len:
            raise ValueError(
                f"prompt has {len(prompt_token_ids)} tokens; with policy.generation.vllm_cfg.max_model_len"
                f" {self._max_model_len} it must be shorter than that"
            )
        loop = asyncio.get_running_loop()
        index = affinity % len(self._actors)
        gathered = self._gathered.get((loop, index))
        if gathered is None:
            gathered = self._gathered[loop, index] = {}
            loop.call_soon(self._submit, loop, index)
        future: asyncio.Future[Completion] = loop.create_future()
        gathered.setdefault((prompt_token_ids, sampling), []).append(future)
        return await future

    def stats(self) -> list[dict[str, float]]:
        """Return each engine's running totals."""
        return self._collect([actor.stats.remote() for actor in self._actors], HEALTH_SECONDS)

    def base_urls(self) -> list[str]:
        """Return the address of each engine's OpenAI-compatible server."""
        return [info.base_url for info in self.infos if info.base_url]

    def check_health(self) -> None:
        """Raise `EngineError` naming an engine that is dead or does not answer."""
        self._collect([actor.check_health.remote() for actor in self._actors], HEALTH_SECONDS)

    def shutdown(self) -> None:
        """Stop all engines, by force when they do not stop within the deadline."""
        calls = [actor.shutdown.remote() for actor in self._actors]
        ray.wait(calls, num_returns=len(calls), timeout=self._deadlines.shutdown)
        for actor in self._actors:
            ray.kill(actor)

    def _submit(self, loop: asyncio.AbstractEventLoop, index: int) -> None:
        """Send everything that this tick has gathered for one engine as one call."""
        gathered = self._gathered.pop((loop, index))
        waiters: dict[int, Waiters] = {}
        requests = []
        for (prompt, sampling), futures in gathered.items():
            # Greedy samples are equal: one serves all.
            num_samples = len(futures) if sampling.temperature > 0 else 1
            request = Request(
                id=next(self._request_ids), prompt_token_ids=prompt, sampling=sampling, num_samples=num_samples
            )
            requests.append(request)
            waiters[request.id] = futures
            for future in futures:
                future.add_done_callback(partial(self._abort_unwanted, index, request.id, waiters))
        call = loop.create_task(self._receive(index, requests, waiters))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _abort_unwanted(self, index: int, request_id: int, waiters: dict[int, Waiters], _: object) -> None:
        """Abort a request in the engine once all who waited for it were cancelled."""
        if request_id in waiters and all(future.cancelled() for future in waiters[request_id]):
            self._actors[index].abort.remote(request_id)

    async def _receive(self, index: int, requests: Sequence[Request], waiters: dict[int, Waiters]) -> None:
        """Hand the answers of one call to those who wait for them; what is left when it fails, fails."""
        deadline = self._deadlines.generation
        generate = self._actors[index].generate.options(num_returns="streaming")
        try:
            stream = aiter(generate.remote(requests, deadline))
            while waiters:
                for answer in await asyncio.wait_for(_next(stream), deadline + GRACE_SECONDS):
                    self._resolve(index, answer, waiters.pop(answer.id))
        except Exception as error:
            failure = self._failure(index, error, deadline)
            for future in (future for futures in waiters.values() for future in futures):
                if not future.done():
                    future.set_exception(failure)

    def _resolve(self, index: int, answer: Answer, futures: Waiters) -> None:
        for number, future in enumerate(futures):
            if future.done():
                continue
            if answer.failure is not None:
                future.set_exception(EngineError(f"{self.infos[index]} {answer.failure}"))
            else:
                future.set_result(_completion(answer.samples[number % len(answer.samples)]))

    def _collect(self, calls: Sequence[Any], deadline: float) -> list[Any]:
        return _collect(calls, [str(info) for info in self.infos], deadline)

    def _failure(self, index: int, error: Exception, deadline: float) -> EngineError:
        return _failure(str(self.infos[index]), error, deadline)


def _collect(calls: Sequence[Any], names: Sequence[str], deadline: float) -> list[Any]:
    """Return the results of one call per engine; raises `EngineError` naming the first that fails or is late."""
    end = time.monotonic() + deadline
    waiting = list(calls)
    results = {}
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(end - time.monotonic(), 0.0))
        for call in done or waiting[:1]:  # none done: the first one is late
            try:
                results[call] = ray.get(call, timeout=0)
            except Exception as error:
                raise _failure(names[calls.index(call)], error, deadline) from error
    return [results[call] for call in calls]


def _failure(name: str, error: Exception, deadline: float) -> EngineError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, EngineError):  # the actor has named itself
        return EngineError(str(cause))
    if isinstance(error, TimeoutError | ray.exceptions.GetTimeoutError):
        reason = f"no answer within {deadline:g} s"
    elif isinstance(error, ray.exceptions.RayActorError):
        reason = "its actor process died"
    else:
        reason = f"{type(cause or error).__name__}: {cause or error}"
    return EngineError(f"{name}: {reason}")


async def _next(stream: AsyncIterator[Any]) -> list[Answer]:
    """Return the next list of answers of a call."""
    answers: list[Answer] = await (await anext(stream))
    return answers


def _completion(sample: Sample) -> Completion:
    return Completion(
        token_ids=tuple(np.frombuffer(sample.token_ids, dtype=np.int32).tolist()),
        logprobs=tuple(np.frombuffer(sample.logprobs, dtype=np.float32).tolist()),
        versions=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in sample.versions),
        finish_reason=sample.finish_reason,
    )
