"""One generation engine: a Ray actor around vLLM's `AsyncLLM`. Token ids in; token ids and log-probabilities out.

The model runs in a subprocess of the actor, vLLM's EngineCore. The actor's event loop takes requests and weight pushes
side by side. A push keeps running requests and their KV, and vLLM reports which weights sampled which token.

Requests come from clients through connections (`serving/outstanding.py`). A request that fails has its failure as its
answer. When the EngineCore process ends, each client is told so, and the actor's methods raise.

What one engine reports of its queue and its cache, sampled over time (`vllm_cfg.enable_vllm_metrics_logger`).

vLLM calls `record` after every iteration of the engine. It would fail all requests if a logger raised, so `record`
never does: samples that cannot be taken are missing, and nothing else is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from recipes import routes
from recipes.cluster.ports import hold_in_range
from recipes.errors import EngineError
from recipes.generation.core_start import allow_routes, as_main_module
from recipes.generation.engine_args import CPU_ENV, ENV, engine_args, stop_token_ids
from recipes.generation.serving.core_log import core_cause
from recipes.generation.serving.outstanding import Listener, OutstandingRequests, Tokens
from recipes.generation.serving.requests import EngineAddress, Request, Sample, request_seed
from recipes.imports import without_gc
from recipes.types import Sampling

if TYPE_CHECKING:
    import numpy as np

    from recipes.config.tree import GenerationConfig
    from recipes.generation.server import HttpServer


logger = logging.getLogger(__name__)

# NeMo RL's names of the timelines. In-flight and pending are requests, the cache is a share between 0 and 1.
IN_FLIGHT, PENDING, CACHE = "inflight_batch_sizes", "num_pending_samples", "kv_cache_usage_perc"
TOKENS = "generation_tokens"
DRAFTS, DRAFT_TOKENS, ACCEPTED = "spec_num_drafts", "spec_num_draft_tokens", "spec_num_accepted_tokens"


class EngineSamples:
    """A stat logger of vLLM: it keeps the newest figures, and a task of the actor samples them at an interval."""

    def __init__(self) -> None:
        self._newest = {IN_FLIGHT: 0.0, PENDING: 0.0, CACHE: 0.0}
        self._sums = dict.fromkeys(self._newest, 0.0)
        self._maxima = dict.fromkeys(self._newest, 0.0)
        self._num_samples = 0
        self._num_tokens = 0
        self._speculated: dict[str, float] = {}  # empty where the engine does not speculate
        self._has_warned = False

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Note the figures of one iteration of the engine; vLLM calls it and passes None for figures that it lacks."""
        try:
            if scheduler_stats is not None:
                self._newest = {
                    IN_FLIGHT: float(scheduler_stats.num_running_reqs),
                    PENDING: float(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs),
                    CACHE: float(scheduler_stats.kv_cache_usage),
                }
                if scheduler_stats.spec_decoding_stats is not None:
                    self._count(scheduler_stats.spec_decoding_stats)
            if iteration_stats is not None:
                self._num_tokens += int(iteration_stats.num_generation_tokens)
        except Exception:
            if not self._has_warned:
                logger.warning("an engine's statistics cannot be read; its samples are incomplete", exc_info=True)
            self._has_warned = True

    def _count(self, stats: Any) -> None:
        counts = {DRAFTS: stats.num_drafts, DRAFT_TOKENS: stats.num_draft_tokens, ACCEPTED: stats.num_accepted_tokens}
        self._speculated = {name: self._speculated.get(name, 0.0) + count for name, count in counts.items()}

    def log_engine_initialized(self) -> None:
        """Do nothing when vLLM says that the engine is up."""

    def sample(self) -> None:
        """Add the newest figures to the samples."""
        self._num_samples += 1
        for name, value in self._newest.items():
            self._sums[name] += value
            self._maxima[name] = max(self._maxima[name], value)

    async def sample_at(self, interval_seconds: float) -> None:
        """Sample for ever."""
        while True:
            await asyncio.sleep(interval_seconds)
            self.sample()

    def take(self) -> dict[str, float]:
        """Return `NAME/mean`, `NAME/max`, generated tokens and drafts since the last call; {} without a sample."""
        if not self._num_samples:
            return {}
        found = {f"{name}/mean": total / self._num_samples for name, total in self._sums.items()}
        found |= {f"{name}/max": value for name, value in self._maxima.items()}
        found |= {TOKENS: float(self._num_tokens), **self._speculated}
        self._speculated = {}
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._maxima = dict.fromkeys(self._maxima, 0.0)
        self._num_samples = self._num_tokens = 0
        return found


_CORE_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Where one engine runs."""

    index: int
    node: str
    pid: int  # of the actor
    core_pids: tuple[int, ...]  # of its EngineCore processes
    address: EngineAddress  # where its clients connect
    base_url: str | None  # of its OpenAI-compatible server
    api_key: str | None = field(repr=False)  # of that server
    import_seconds: float
    engine_seconds: float
    server_seconds: float

    def __str__(self) -> str:
        cores = ", ".join(map(str, self.core_pids))
        return f"generation engine {self.index} (node {self.node}, actor pid {self.pid}, EngineCore pid {cores})"


class Usage:
    """Running totals of one actor. `busy_seconds` is the time with at least one request in flight."""

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

    def __init__(self, cfg: GenerationConfig, *, index: int, model_path: str, seed: int, loads_weights: bool) -> None:
        self._cfg = cfg
        self._index = index
        self._model_path = model_path
        self._seed = seed
        self._loads_weights = loads_weights
        self._num_pushes = 0
        self._outstanding = OutstandingRequests(self)
        self._usage = Usage()
        self._server: HttpServer | None = None
        self._samples: EngineSamples | None = None
        # These must be set before torch and vLLM are imported. The EngineCore process inherits them.
        os.environ.update(ENV)
        for name, value in ({} if ray.get_gpu_ids() else CPU_ENV).items():
            os.environ.setdefault(name, value)

    async def start(self) -> EngineInfo:
        """Load the model and take connections of clients, and over HTTP where the configuration says so."""
        began = time.monotonic()
        with without_gc():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

        imported = time.monotonic()
        is_cpu = current_platform.is_cpu()
        # vLLM's own seed is for HTTP requests, which bring none: two engines must not repeat each other's samples.
        seed = self._seed + self._index
        args = engine_args(
            self._cfg, model_path=self._model_path, seed=seed, is_cpu=is_cpu, loads_weights=self._loads_weights
        )
        allow_routes()
        samples = EngineSamples() if self._cfg.vllm_cfg.enable_vllm_metrics_logger else None
        loggers: list[Any] = [lambda *_: samples] if samples else []
        with without_gc(), as_main_module():
            try:
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args), stat_loggers=loggers)
            except RuntimeError as error:  # vLLM's own names no cause when its other process fails
                raise EngineError(f"generation engine {self._index}: {error}: {core_cause()}") from error
        if samples is not None:
            self._begin_sampling(samples)
        self._stop_token_ids = list(stop_token_ids(Path(self._model_path)))
        await self._llm.update_weight_version("0")
        loaded = time.monotonic()
        host = ray.util.get_node_ip_address()
        held = hold_in_range(self._cfg.port_range_low, self._cfg.port_range_high, host=host)
        self._listener = await Listener.start(self._outstanding, held)
        if self._cfg.vllm_cfg.expose_http_server:
            from recipes.generation.server import HttpServer

            self._server = await HttpServer.start(self._llm, self._cfg, host=host, count=self._counted)
        processes = self._llm.engine_core.resources.engine_manager.processes
        self._info = EngineInfo(
            index=self._index,
            node=socket.gethostname(),
            pid=os.getpid(),
            core_pids=tuple(process.pid for process in processes),
            address=self._listener.address,
            base_url=self._server.base_url if self._server else None,
            api_key=self._server.api_key if self._server else None,
            import_seconds=imported - began,
            engine_seconds=loaded - imported,
            server_seconds=time.monotonic() - loaded,
        )
        logger.info("%s is up", self._info)
        return self._info

    async def connect_weights(
        self, init_info: dict[str, Any], announced: tuple[str, dict[str, Any]], *, is_copied: bool = False
    ) -> None:
        """Prepare the weight transfer; `announced` has the digest of the layout and what is the same for all pushes.

        `is_copied` says that the policy's file is on another host.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if is_copied:
            from recipes.generation.weight_transfer import WeightCopy

            self._copy = WeightCopy(init_info["num_bytes"])
            init_info = {**init_info, "path": self._copy.path}
        await self._llm.shutdown_weight_transfer_engine()  # leave the group of before, which this one replaces
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        await self._llm.collective_rpc("announce_pushes", args=announced)

    async def drain(self) -> None:
        """Wait until the running requests have ended; others wait until the push that must follow."""
        await self._while_alive(self._llm.engine_core.pause_scheduler_async(mode="wait", clear_cache=False))

    async def update_weights(
        self,
        version: int,
        layout: str,
        update_info: dict[str, Any],
        content: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
        *,
        keeps_caches: bool = True,
    ) -> None:
        """Load the policy's current weights as `version`; running requests go on, and without `keeps_caches` anew.

        `layout` is the digest of the layout by which they are sent, which must be that of `connect_weights`.
        When this raises, the engine stays paused and must be replaced: its weights may be partly old, partly new.
        """
        began = time.monotonic()
        if content is not None:
            self._copy.write(content)
        await self._while_alive(self._push(version, layout, update_info, keeps_caches=keeps_caches))
        self._num_pushes += 1
        self._usage.update_seconds += time.monotonic() - began

    async def _push(self, version: int, layout: str, update_info: dict[str, Any], *, keeps_caches: bool) -> None:
        llm = self._llm
        # AsyncLLM.pause_generation does this, then sleeps 20 ms only for the order of events in the caller's view.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        arguments = (layout, update_info, self._cfg.verify_weight_pushes)
        self._received = await llm.collective_rpc("load_pushed_weights", args=arguments)
        await llm.update_weight_version(str(version))
        await llm.reset_prefix_cache(reset_running_requests=not keeps_caches)
        await llm.resume_generation()

    async def verify_weights(self, sent: Mapping[str, int]) -> None:
        """Raise `EngineError` where a rank has received tensors of other checksums in the last push."""
        for rank, received in enumerate(self._received):
            wrong = [name for name in sent | received if sent.get(name) != received.get(name)]
            if wrong:
                example = f"{len(wrong)} of {len(sent)} tensors, for example {wrong[0]}"
                raise EngineError(f"{self}: rank {rank} has not received what the policy has sent: {example}")

    async def _while_alive(self, call: Coroutine[Any, Any, None]) -> None:
        """Await calls to the EngineCore process; raises `EngineError` when that ends, for then no answer comes."""
        task = asyncio.ensure_future(call)
        while not task.done():
            if self._llm.errored:
                task.cancel()
                raise EngineError(f"{self} is dead: its EngineCore process ended: {core_cause()}")
            await asyncio.wait({task}, timeout=_CORE_POLL_SECONDS)
        await task

    async def forget(self, client: str) -> None:
        """End every request and every session of a client that has died."""
        self._outstanding.forget(client)

    def __str__(self) -> str:
        return str(self._info)

    @property
    def is_dead(self) -> bool:
        """Whether the EngineCore process has ended."""
        return bool(self._llm.errored)

    @contextmanager
    def _counted(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as in flight; raises `EngineError` before the push that this engine has to wait for."""
        if not self._loads_weights and not self._num_pushes:
            raise EngineError(f"{self._info} has no weights: nothing has been pushed to it since it was started")
        with self._usage.request(num_sequences):
            yield

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        """Return one completion; cancelling aborts it in vLLM."""
        from vllm.inputs.engine import tokens_input

        from recipes.generation.core import push_salt

        tokens = tokens_input(prompt.values, cache_salt=push_salt(self._num_pushes))
        params = self._params(
            request.sampling, seed=request_seed(self._seed, request, prompt.ids), routes_from=request.routes_from
        )
        with self._counted(1):
            async for output in self._llm.generate(tokens, params, name):
                final = output
        [completion] = final.outputs
        totals = self._usage.totals
        totals["requests"] += 1
        totals["prompt_tokens"] += len(prompt.values)
        totals["cached_prompt_tokens"] += final.num_cached_tokens or 0
        totals["generated_tokens"] += len(completion.token_ids)
        routed = b""
        if completion.routed_experts is not None:  # all but the last token, which is computed with what follows it
            start = len(prompt.values) + len(completion.token_ids) - 1 - len(completion.routed_experts)
            routed = await asyncio.to_thread(routes.pack, completion.routed_experts, start)
        return _sample(completion, routed)

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

    def _begin_sampling(self, samples: EngineSamples) -> None:
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        # vLLM adds its Prometheus logger to every other. Nothing reads it here, and it costs time at every iteration.
        manager = self._llm.logger_manager
        manager.stat_loggers = [one for one in manager.stat_loggers if not isinstance(one, PrometheusStatLogger)]
        self._samples = samples
        self._sampling = asyncio.create_task(samples.sample_at(self._cfg.vllm_cfg.vllm_metrics_logger_interval))

    async def take_samples(self) -> dict[str, float]:
        """Return what the engine's samples say since the last call; {} where none are taken."""
        return self._samples.take() if self._samples else {}

    async def shutdown(self) -> None:
        """Take no more requests and end the EngineCore process."""
        self._listener.close()
        if self._server is not None:
            await self._server.stop()
        self._llm.shutdown()

    def _params(self, sampling: Sampling, *, seed: int, routes_from: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,  # lists instead of an object per token
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            routed_experts_prompt_start=routes_from,
        )


def _sample(completion: Any, routed: bytes) -> Sample:
    """Compact one vLLM `CompletionOutput`."""
    import numpy as np

    return Sample(
        token_ids=np.asarray(completion.token_ids, dtype=np.int32).tobytes(),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32).tobytes(),
        versions=tuple((int(span.version), span.start, span.end) for span in completion.weight_versions or ()),
        finish_reason=completion.finish_reason,
        routes=routed,
    )
