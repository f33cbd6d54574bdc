"""One generation engine: a Ray actor around vLLM's `AsyncLLM`. Token ids in; token ids and log-probabilities out.

The engine's model runs in a subprocess of the actor, vLLM's EngineCore. Requests and weight pushes interleave on the
actor's event loop; a push keeps the requests in flight and their KV, and vLLM reports which weights made which token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from recipes.errors import EngineError
from recipes.generation.engine_args import CPU_ENV, ENV, engine_args, stop_token_ids, top_k
from recipes.types import Sampling

if TYPE_CHECKING:
    import numpy as np

    from recipes.config.tree import GenerationConfig
    from recipes.generation.server import HttpServer

logger = logging.getLogger(__name__)

_CORE_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Where one engine runs."""

    index: int
    node: str
    pid: int  # of the actor
    core_pids: tuple[int, ...]  # of its EngineCore processes
    base_url: str | None  # of its OpenAI-compatible server
    import_seconds: float
    engine_seconds: float
    server_seconds: float

    def __str__(self) -> str:
        cores = ", ".join(map(str, self.core_pids))
        return f"generation engine {self.index} (node {self.node}, actor pid {self.pid}, EngineCore pid {cores})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion on its way from the actor to the driver; arrays as bytes, which cross processes fastest."""

    token_ids: bytes  # int32 [T]
    logprobs: bytes  # float32 [T]
    versions: tuple[tuple[int, int, int], ...]  # version, start, end
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Some completions of one prompt."""

    id: int  # unique per engine; the driver counts
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a request: its samples, or why there are none."""

    id: int
    samples: list[Sample]
    failure: str | None


class Usage:
    """Running totals of one engine. `busy_seconds` counts the time with at least one request in flight."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._busy_since = 0.0
        self.in_flight = 0
        self.totals = dict.fromkeys(("requests", "prompt_tokens", "cached_prompt_tokens", "generated_tokens"), 0)
        self.update_seconds = 0.0

    @contextmanager
    def request(self, num_sequences: int) -> Iterator[None]:
        """Count `num_sequences` as in flight."""
        if self.in_flight == 0:
            self._busy_since = time.monotonic()
        self.in_flight += num_sequences
        try:
            yield
        finally:
            self.in_flight -= num_sequences
            if self.in_flight == 0:
                self._busy_seconds += time.monotonic() - self._busy_since

    @property
    def busy_seconds(self) -> float:
        return self._busy_seconds + (time.monotonic() - self._busy_since if self.in_flight else 0.0)


class EngineActor:
    """Holds one `AsyncLLM`. Every method is a coroutine on the actor's one event loop."""

    def __init__(self, cfg: GenerationConfig, *, index: int, model_path: str, seed: int) -> None:
        self._cfg = cfg
        self._index = index
        self._model_path = model_path
        self._seed = seed + index  # engines of one run must not repeat each other's samples
        self._num_pushes = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by request id
        self._usage = Usage()
        self._server: HttpServer | None = None
        # Before torch and vLLM are imported, here and in the EngineCore process, which inherits them.
        for name, value in (ENV if ray.get_gpu_ids() else {**ENV, **CPU_ENV}).items():
            os.environ.setdefault(name, value)

    async def start(self) -> EngineInfo:
        """Load the model and, if asked for, open the HTTP server."""
        began = time.monotonic()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        imported = time.monotonic()
        is_cpu = current_platform.is_cpu()
        args = engine_args(self._cfg, model_path=self._model_path, seed=self._seed, is_cpu=is_cpu)
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        self._stop_token_ids = list(stop_token_ids(Path(self._model_path)))
        await self._llm.update_weight_version("0")
        loaded = time.monotonic()
        if self._cfg.vllm_cfg.expose_http_server:
            from recipes.generation.server import HttpServer

            host = ray.util.get_node_ip_address()
            self._server = await HttpServer.start(self._llm, self._cfg, host=host, count=self._usage.request)
        processes = self._llm.engine_core.resources.engine_manager.processes
        self._info = EngineInfo(
            index=self._index,
            node=socket.gethostname(),
            pid=os.getpid(),
            core_pids=tuple(process.pid for process in processes),
            base_url=self._server.base_url if self._server else None,
            import_seconds=imported - began,
            engine_seconds=loaded - imported,
            server_seconds=time.monotonic() - loaded,
        )
        logger.info("%s is up", self._info)
        return self._info

    async def connect_weights(self, init_info: dict[str, Any], *, is_copied: bool = False) -> None:
        """Prepare the transfer; see `weight_transfer`. With `is_copied` the policy's file is on another host."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if is_copied:
            from recipes.generation.weight_transfer import WeightCopy

            self._copy = WeightCopy(init_info["num_bytes"])
            init_info = {**init_info, "path": self._copy.path}
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def update_weights(
        self, version: int, update_info: dict[str, Any], content: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    ) -> None:
        """Load the policy's current weights as `version`, keeping requests in flight and their KV.

        Should a step fail the engine stays paused: its weights may be half old, half new.
        """
        began = time.monotonic()
        if content is not None:
            self._copy.write(content)
        await self._while_alive(self._push(version, update_info))
        self._num_pushes += 1
        self._usage.update_seconds += time.monotonic() - began

    async def _push(self, version: int, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        # AsyncLLM.pause_generation does this, then sleeps 20 ms only for the order of events in the caller's view.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))
        await llm.finish_weight_update(str(version))
        await llm.reset_prefix_cache()
        await llm.resume_generation()

    async def _while_alive(self, call: Coroutine[Any, Any, None]) -> None:
        """Await calls to the EngineCore process; raises `EngineError` when that ends, for then no answer comes."""
        task = asyncio.ensure_future(call)
        while not task.done():
            if self._llm.errored:
                task.cancel()
                raise EngineError(f"{self._info} is dead: its EngineCore process ended")
            await asyncio.wait({task}, timeout=_CORE_POLL_SECONDS)
        await task

    async def generate(self, requests: Sequence[Request], deadline_seconds: float) -> AsyncIterator[list[Answer]]:
        """Yield the answers to all requests as they come, those that are ready together in one list."""
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        tasks = [asyncio.create_task(self._answer(request, deadline_seconds, answers)) for request in requests]
        left = len(tasks)
        while left:
            ready = [await answers.get()]
            while not answers.empty():
                ready.append(answers.get_nowait())
            left -= len(ready)
            yield ready

    async def abort(self, request_id: int) -> None:
        """End a request that nobody waits for any more; its answer says so."""
        if task := self._tasks.get(request_id):
            task.cancel()

    async def _answer(self, request: Request, deadline_seconds: float, answers: asyncio.Queue[Answer]) -> None:
        """Put the outcome of one request into the queue: always one, whatever happens."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request.id] = task  # from here on: a task cancelled before its start would answer nothing
        samples: list[Sample] = []
        failure = None
        try:
            async with asyncio.timeout(deadline_seconds):
                samples = await self._complete(request)
        except TimeoutError:
            failure = f"did not answer within {deadline_seconds:g} s; aborted"
        except asyncio.CancelledError:
            failure = "was told to abort the request"
        except Exception as error:  # crosses to the driver as a value: the other requests of the call go on
            failure = (
                "is dead: its EngineCore process ended" if self._llm.errored else f"{type(error).__name__}: {error}"
            )
        del self._tasks[request.id]
        answers.put_nowait(Answer(id=request.id, samples=samples, failure=failure))

    async def _complete(self, request: Request) -> list[Sample]:
        """Return the completions of one prompt; cancelling aborts them in the engine."""
        from vllm.inputs.engine import tokens_input

        from recipes.generation.core import push_salt

        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=push_salt(self._num_pushes))
        params = self._params(request.sampling, request.num_samples)
        with self._usage.request(request.num_samples):
            async for output in self._llm.generate(prompt, params, str(request.id)):
                final = output
        totals = self._usage.totals
        totals["requests"] += request.num_samples
        totals["prompt_tokens"] += len(request.prompt_token_ids) * request.num_samples
        totals["cached_prompt_tokens"] += (final.num_cached_tokens or 0) * request.num_samples
        totals["generated_tokens"] += sum(len(completion.token_ids) for completion in final.outputs)
        return [_sample(completion) for completion in final.outputs]

    async def stats(self) -> dict[str, float]:
        """Return running totals and the sequences in flight, split by the engine's batch limit."""
        usage, limit = self._usage, self._llm.scheduler_config.max_num_seqs
        return {
            "busy_seconds": usage.busy_seconds,
            "update_seconds": usage.update_seconds,
            "running": min(usage.in_flight, limit),
            "waiting": max(usage.in_flight - limit, 0),
            **usage.totals,
        }

    async def check_health(self) -> None:
        """Raise when the EngineCore process is gone."""
        if self._llm.errored:
            raise EngineError(f"{self._info} is dead: its EngineCore process ended")

    async def shutdown(self) -> None:
        """Close the server and end the EngineCore process."""
        if self._server is not None:
            await self._server.stop()
        self._llm.shutdown()

    def _params(self, sampling: Sampling, n: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=n,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=top_k(self._cfg),
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,  # lists instead of an object per token
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )


def _sample(completion: Any) -> Sample:
    """Compact one vLLM `CompletionOutput`."""
    import numpy as np

    return Sample(
        token_ids=np.asarray(completion.token_ids, dtype=np.int32).tobytes(),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32).tobytes(),
        versions=tuple((int(span.version), span.start, span.end) for span in completion.weight_versions or ()),
        finish_reason=completion.finish_reason,
    )
