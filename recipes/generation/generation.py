"""The driver's handle on all engines: requests in, completions out, weights pushed to all at once.

Requests for the same prompt and sampling that are made in one tick of an event loop travel as one call with n samples:
a group's G rollouts start together, and the engine computes their common prompt once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from recipes.generation.engine import EngineActor, EngineInfo, Sample
from recipes.grpo.errors import EngineError
from recipes.grpo.types import Completion, Sampling, VersionSpan, WeightLayout

if TYPE_CHECKING:
    from recipes.grpo.config_tree import DeadlinesConfig
    from recipes.grpo.config_tree_policy import GenerationConfig

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # beyond a deadline that the actor itself keeps, before the driver gives the actor up
HEALTH_SECONDS = 10.0

BatchKey = tuple[asyncio.AbstractEventLoop, int, tuple[int, ...], Sampling]


class Generation:
    """Engines as one. Methods block unless they are coroutines; all may be called from any thread."""

    def __init__(
        self, actors: Sequence[Any], infos: Sequence[EngineInfo], *, max_model_len: int, deadlines: DeadlinesConfig
    ) -> None:
        self._actors = actors
        self.infos = infos
        self._max_model_len = max_model_len
        self._deadlines = deadlines
        self._update_lock = threading.Lock()
        self._batches: dict[BatchKey, list[asyncio.Future[Completion]]] = {}
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
        try:
            infos = ray.get([actor.start.remote() for actor in actors], timeout=deadlines.engine_start)
        except Exception as error:
            for actor in actors:
                ray.kill(actor)
            raise EngineError(f"generation engines did not start: {_reason(error, deadlines.engine_start)}") from error
        for info in infos:
            logger.info("%s: import %.1f s, engine %.1f s", info, info.import_seconds, info.engine_seconds)
        return cls(actors, infos, max_model_len=cfg.vllm_cfg.max_model_len, deadlines=deadlines)

    def connect_weights(self, layout: WeightLayout) -> None:
        """Tell every engine where the policy puts its weights."""
        init_info = {
            "path": layout.path,
            "names": list(layout.names),
            "dtypes": list(layout.dtypes),
            "shapes": [list(shape) for shape in layout.shapes],
            "offsets": list(layout.offsets),
            "num_bytes": layout.num_bytes,
        }
        self._on_all("connect_weights", init_info, deadline=self._deadlines.refit)

    def update_weights(self, version: int) -> None:
        """Load the weights the policy has sent as `version`, on all engines at once; returns when all use them."""
        with self._update_lock:
            self._on_all("update_weights", version, {}, deadline=self._deadlines.refit)

    async def generate(self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, affinity: int) -> Completion:
        """Sample one completion on the engine that `affinity` picks; raises `EngineError` when it is dead or late."""
        if len(prompt_token_ids) >= self._max_model_len:
            raise ValueError(
                f"prompt has {len(prompt_token_ids)} tokens; with policy.generation.vllm_cfg.max_model_len"
                f" {self._max_model_len} it must be shorter than that"
            )
        loop = asyncio.get_running_loop()
        key = (loop, affinity % len(self._actors), prompt_token_ids, sampling)
        waiters = self._batches.get(key)
        if waiters is None:
            waiters = self._batches[key] = []
            loop.call_soon(self._submit, key)
        future: asyncio.Future[Completion] = loop.create_future()
        waiters.append(future)
        return await future

    def stats(self) -> list[dict[str, float]]:
        """Return each engine's running totals."""
        stats: list[dict[str, float]] = self._on_all("stats", deadline=HEALTH_SECONDS)
        return stats

    def base_urls(self) -> list[str]:
        """Return the address of each engine's OpenAI-compatible server."""
        return [info.base_url for info in self.infos if info.base_url]

    def check_health(self) -> None:
        """Raise `EngineError` naming an engine that is dead or does not answer."""
        self._on_all("check_health", deadline=HEALTH_SECONDS)

    def shutdown(self) -> None:
        """Stop all engines, by force when they do not stop within the deadline."""
        calls = [actor.shutdown.remote() for actor in self._actors]
        ray.wait(calls, num_returns=len(calls), timeout=self._deadlines.shutdown)
        for actor in self._actors:
            ray.kill(actor)

    def _submit(self, key: BatchKey) -> None:
        waiters = self._batches.pop(key)
        call = key[0].create_task(self._call(key, waiters))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

        def cancel_when_unwanted(_: asyncio.Future[Completion]) -> None:
            if all(waiter.cancelled() for waiter in waiters):
                call.cancel()

        for waiter in waiters:
            waiter.add_done_callback(cancel_when_unwanted)

    async def _call(self, key: BatchKey, waiters: Sequence[asyncio.Future[Completion]]) -> None:
        _, index, prompt, sampling = key
        deadline = self._deadlines.generation
        num_samples = len(waiters) if sampling.temperature > 0 else 1  # greedy samples are equal: one serves all
        reply = self._actors[index].generate.remote(prompt, sampling, num_samples, deadline)
        try:
            samples = await asyncio.wait_for(_result(reply), deadline + GRACE_SECONDS)
        except asyncio.CancelledError:
            ray.cancel(reply)
            raise
        except Exception as error:
            failure = self._failure(index, error, deadline)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(failure)
            return
        for number, waiter in enumerate(waiters):
            if not waiter.done():
                waiter.set_result(_completion(samples[number % num_samples]))

    def _on_all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        calls = [getattr(actor, method).remote(*args) for actor in self._actors]
        ray.wait(calls, num_returns=len(calls), timeout=deadline)
        results = []
        for index, call in enumerate(calls):
            try:
                results.append(ray.get(call, timeout=0))
            except Exception as error:
                raise self._failure(index, error, deadline) from error
        return results

    def _failure(self, index: int, error: Exception, deadline: float) -> EngineError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EngineError):  # the actor has named itself
            return EngineError(str(cause))
        return EngineError(f"{self.infos[index]}: {_reason(error, deadline)}")


async def _result(reply: Any) -> list[Sample]:
    samples: list[Sample] = await reply
    return samples


def _completion(sample: Sample) -> Completion:
    return Completion(
        token_ids=tuple(np.frombuffer(sample.token_ids, dtype=np.int32).tolist()),
        logprobs=tuple(np.frombuffer(sample.logprobs, dtype=np.float32).tolist()),
        versions=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in sample.versions),
        finish_reason=sample.finish_reason,
    )


def _reason(error: Exception, deadline: float) -> str:
    """Say in one line why a call on an actor failed."""
    if isinstance(error, TimeoutError | ray.exceptions.GetTimeoutError):
        return f"no answer within {deadline:g} s"
    if isinstance(error, ray.exceptions.RayActorError):
        return "its actor process died"
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}"
