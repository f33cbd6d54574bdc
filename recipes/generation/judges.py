"""The driver's handle on the judges that the run starts: real vLLM engines, each served under one address.

    an engine dies, or does not answer    its actor is ended and another one started at the same address; questions that
                                          come meanwhile wait, go to another copy, or end without a verdict
    a start of a copy fails               it is tried again; the run begins when enough copies of each judge are up
    it cannot be started again            the run says so and goes on: its environments are paused when too many of
                                          their rollouts end without a verdict

One thread watches all engines.

One engine of a judge: a Ray actor around vLLM's `AsyncLLM` and its OpenAI-compatible server.

A judge keeps the weights of its files: nothing is pushed to it. Its address is held from the first call on, so that the
environments can be told it while the model still loads; what connects until then waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import ray

from recipes.cluster.placement import ActorOptions, node_of
from recipes.cluster.ports import hold, hold_in_range
from recipes.cluster.starts import NUM_DEADLINES, Starts, wrong_input
from recipes.errors import ConfigError, EngineError, LaunchError, Problem, RunError
from recipes.generation.clients.failure import failure
from recipes.generation.engine_args import CPU_ENV, ENV
from recipes.generation.serving.core_log import core_cause

if TYPE_CHECKING:
    from recipes.config.keys.derive import StartedJudge
    from recipes.config.tree import DeadlinesConfig, GenerationConfig


PORT_SECONDS = 20.0
_POLL_SECONDS = 0.5


class JudgeActor:
    """Holds one `AsyncLLM`. Every method is a coroutine on the actor's one event loop."""

    def __init__(self, judge: StartedJudge, *, api_key: str, ports: tuple[int, int]) -> None:
        """`ports` is the half-open range from which the server takes one."""
        self._judge, self._api_key, self._ports = judge, api_key, ports
        self._name = f"judge {judge.name}"
        # These must be set before torch and vLLM are imported. The EngineCore process inherits them.
        os.environ.update({**ENV, **judge.variables})
        for name, value in ({} if ray.get_gpu_ids() else CPU_ENV).items():
            os.environ.setdefault(name, value)

    async def hold_address(self, port: int | None) -> str:
        """Take `port`, or a port of the range, and return the base URL of the server to come.

        The actor that had the port may still be ending; raises `LaunchError` when it is busy for `PORT_SECONDS`.
        """
        host = ray.util.get_node_ip_address()
        end = time.monotonic() + PORT_SECONDS
        while True:
            try:
                self._socket = hold_in_range(*self._ports, host=host) if port is None else hold(port, host=host)
                return f"http://{host}:{self._socket.getsockname()[1]}/v1"
            except LaunchError:
                if port is None or time.monotonic() >= end:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    async def start(self) -> str:
        """Load the model, serve it, and return where it runs."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from recipes.generation.server import HttpServer

        args = serve_arguments(self._judge, is_cpu=current_platform.is_cpu())
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        except RuntimeError as error:  # vLLM's own names no cause when its other process fails
            raise EngineError(f"{self._name}: {error}: {core_cause()}") from error
        self._server = await HttpServer.serve(
            self._llm, args, held=self._socket, api_key=self._api_key, count=_uncounted
        )
        self._name += f" (node {socket.gethostname()}, actor pid {os.getpid()})"
        return self._name

    async def watch(self, seconds: float) -> None:
        """Return after `seconds`; raises `EngineError` as soon as the EngineCore process has ended."""
        for _ in range(max(1, round(seconds / _POLL_SECONDS))):
            if self._llm.errored:
                raise EngineError(f"{self._name} is dead: its EngineCore process ended: {core_cause()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def shutdown(self) -> None:
        """Close the server and end the EngineCore process."""
        await self._server.stop()
        self._llm.shutdown()


def _uncounted(_num_sequences: int) -> AbstractContextManager[None]:
    return nullcontext()


def serve_arguments(judge: StartedJudge, *, is_cpu: bool) -> Any:
    """Return the arguments of `vllm serve` for one copy of a judge, as vLLM's own parser gives them.

    Raises `ConfigError` for names that vLLM does not know.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model = str(Path(judge.model).resolve()) if Path(judge.model).is_dir() else judge.model
    words = ["--model", model, "--served-model-name", judge.model]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    ours: Mapping[str, Any] = {
        "distributed_executor_backend": "uni" if judge.gpus_per_copy == 1 else "mp",
        # Of what this scheduler does, a judge needs one thing: the EngineCore process ends with its actor.
        "scheduler_cls": f"recipes.generation.core.Rollout{'' if is_cpu else 'Async'}Scheduler",
        "disable_log_stats": True,
    }
    # On CPU this module installs in vLLM's workers what a model with experts needs there.
    extension = {"worker_extension_cls": "recipes.generation.weight_transfer.WorkerExtension"} if is_cpu else {}
    unknown = [name for name in judge.engine_arguments if not hasattr(args, name)]
    if unknown:
        fix = "correct the name, or remove it"
        where = f"{judge.key}.vllm_serve_kwargs"
        raise ConfigError(
            [Problem(where=f"{where}.{name}", wrong="vLLM has no such argument", fix=fix) for name in unknown]
        )
    for name, value in {**extension, **judge.engine_arguments, **ours}.items():
        setattr(args, name, value)
    return args


logger = logging.getLogger(__name__)

WATCH_SECONDS = 5.0
SILENCE_SECONDS = 60.0  # beyond those, after which an actor counts as dead
ANSWER_SECONDS = 60.0  # for the first answer of a server that has just started


class JudgeEngine:
    """One copy of a judge: it keeps its address, its actor is replaced when it dies."""

    def __init__(
        self, judge: StartedJudge, options: ActorOptions, *, number: int, api_key: str, ports: tuple[int, int]
    ):
        self.judge = judge
        self.name = f"judge {judge.name}, copy {number}"
        self.url = ""
        self.num_starts = 0
        self.actor: Any = None
        self._options = options
        self._remote = ray.remote(JudgeActor).options(**options)
        self._api_key, self._ports = api_key, ports

    def __str__(self) -> str:
        return f"{self.name}, at {self.url or 'no address yet'}"

    def node(self) -> str:
        """Return the name of the node on which the copy is placed. Blocking."""
        return node_of(self._options)

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


_Step = Callable[[JudgeEngine], Coroutine[Any, Any, None]]


class Judges:
    """All engines of all judges."""

    def __init__(
        self, engines: Sequence[JudgeEngine], api_key: str, cfg: GenerationConfig, deadlines: DeadlinesConfig
    ) -> None:
        self._engines, self._deadlines = engines, deadlines
        self.api_key = api_key
        copies: dict[str, list[str]] = {}
        for engine in engines:
            copies.setdefault(engine.judge.name, []).append(engine.name)
        self.starts = Starts(*copies.values(), max_starts=cfg.max_starts, min_share=cfg.min_share_up)
        self._watchers: list[concurrent.futures.Future[None]] = []  # kept: a loop holds its tasks weakly
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    @classmethod
    def launch(
        cls,
        judges: Sequence[StartedJudge],
        *,
        placement: Sequence[ActorOptions],
        cfg: GenerationConfig,
        deadlines: DeadlinesConfig,
    ) -> Judges:
        """Create one actor per copy of each judge, in order, and return once enough have an address.

        `placement` has the options of each actor; `cfg` says from which ports the servers take one. Raises `RunError`
        when too few copies of a judge get an address. The models load after `load` is called.
        """
        api_key = os.environ.get("VLLM_API_KEY") or secrets.token_hex(32)
        ports = (cfg.port_range_low, cfg.port_range_high)
        copies = [(judge, number) for judge in judges for number in range(judge.num_copies)]
        engines = [
            JudgeEngine(judge, options, number=number, api_key=api_key, ports=ports)
            for (judge, number), options in zip(copies, placement, strict=True)
        ]
        started = cls(engines, api_key, cfg, deadlines)
        started._begin(started._take_address, seconds=NUM_DEADLINES * deadlines.placement)
        return started

    def addresses(self) -> dict[str, list[str]]:
        """Return the base URLs of every judge by the name of its instance."""
        found: dict[str, list[str]] = {}
        for engine in self._engines:
            if engine.url:
                found.setdefault(engine.judge.name, []).append(engine.url)
        return found

    def load(self) -> None:
        """Load the models and watch the engines from then on; raises `RunError` when too few copies are up."""
        for engine in self._engines:
            if engine.url:  # else it has been given up
                self.starts.lost(engine.name, "its model has not been loaded yet")
        self._begin(self._watch, seconds=NUM_DEADLINES * self._deadlines.engine_start)

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

    def _begin(self, work: _Step, *, seconds: float) -> None:
        """Begin the work of each engine, and wait until enough copies of each judge are up; else all actors end.

        Raises `RunError` then.
        """
        self._watchers += [asyncio.run_coroutine_threadsafe(work(engine), self._loop) for engine in self._engines]
        try:
            self.starts.wait(seconds)
        except RunError:
            self.shutdown()
            raise

    async def _take_address(self, engine: JudgeEngine) -> None:
        await self._start(engine, self._launch, self._launch)

    async def _watch(self, engine: JudgeEngine) -> None:
        """Load the model, and replace the actor of an engine whenever it fails, until it cannot be started again."""
        is_up = bool(engine.url) and await self._start(engine, self._load, self._replace)
        while is_up:
            try:
                while True:
                    await asyncio.wait_for(engine.actor.watch.remote(WATCH_SECONDS), WATCH_SECONDS + SILENCE_SECONDS)
            except Exception as error:  # whatever it is, the engine cannot be relied on
                lost = failure(str(engine), error, WATCH_SECONDS + SILENCE_SECONDS)
                self.starts.lost(engine.name, lost)
                logger.warning("%s", lost)
            is_up = await self._start(engine, self._replace, self._replace)
        logger.error("the questions that %s would be asked get no reply", engine)

    async def _start(self, engine: JudgeEngine, first: _Step, again: _Step) -> bool:
        """Start an actor with `first`, after each failure another with `again`; return whether one is up in the end."""
        step = first
        seconds = self._deadlines.engine_start if engine.url else self._deadlines.placement
        while True:
            try:
                await step(engine)
            except Exception as error:
                ray.kill(engine.actor)
                reason = failure(engine.name, error, seconds)
                node = await asyncio.to_thread(engine.node)
                if not self.starts.failed(engine.name, reason, node=node, is_final=wrong_input(error)):
                    return False
                step = again
            else:
                self.starts.succeeded(engine.name)
                return True

    async def _launch(self, engine: JudgeEngine) -> None:
        await engine.launch(self._deadlines.placement)

    async def _load(self, engine: JudgeEngine) -> None:
        await engine.load(self._deadlines.engine_start)

    async def _replace(self, engine: JudgeEngine) -> None:
        ray.kill(engine.actor)
        await self._launch(engine)
        await self._load(engine)


async def _end_watching() -> None:
    """Cancel all tasks of this loop, let them end, and stop the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()
