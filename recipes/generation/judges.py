"""The driver's handle on the judges that the run starts: real vLLM engines, each served under one address.

    an engine dies, or does not answer    its actor is ended and another one started, at the same address if that is
                                          free; questions that come meanwhile go to another copy, or wait where there
                                          is none, or end without a verdict
    a start of a copy fails               it is tried again, where a place is free elsewhere; the run begins when enough
                                          copies of each judge are up; those that come later are asked from then on
    it cannot be started again            the run says so and goes on: where no copy is left, environments are paused
                                          when too many of their rollouts end without a verdict

One thread watches all engines.

One engine of a judge: a Ray actor around vLLM's `AsyncLLM` and its OpenAI-compatible server.

A judge keeps the weights of its files: nothing is pushed to it. Its address is held from the first call on, so that the
environments can be told it while the model still loads; what connects until then waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import ray

from recipes.cluster.placement import ActorOptions, Place
from recipes.cluster.ports import hold, hold_in_range, url_of
from recipes.cluster.starts import NUM_DEADLINES, BackgroundLoop, Starts, wrong_input
from recipes.errors import ConfigError, EngineError, LaunchError, Problem, RecipeError
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
        """Take `port`, or a port of the range where it stays busy, and return the base URL of the server to come.

        The actor that had the port may still be ending, which is waited for `PORT_SECONDS`.
        """
        host = ray.util.get_node_ip_address()
        end = time.monotonic() + PORT_SECONDS
        while port is not None and time.monotonic() < end:
            try:
                self._socket = hold(port, host=host)
                break
            except LaunchError:
                await asyncio.sleep(_POLL_SECONDS)
        else:
            self._socket = hold_in_range(*self._ports, host=host)
        return url_of(host, self._socket.getsockname()[1], "/v1")

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
    """One copy of a judge: it keeps its number, its actor is replaced when it dies."""

    def __init__(
        self, judge: StartedJudge, options: ActorOptions, *, number: int, api_key: str, ports: tuple[int, int]
    ):
        self.judge = judge
        self.name = f"judge {judge.name}, copy {number}"
        self.url = ""
        self.num_starts = 0
        self.actor: Any = None
        self.place = Place(options)
        self._api_key, self._ports = api_key, ports

    def __str__(self) -> str:
        return f"{self.name}, at {self.url or 'no address yet'}"

    async def launch(self, deadline_seconds: float) -> None:
        """Create an actor and have it take an address, the present one if there is one and it is free there."""
        self.num_starts += 1
        made = ray.remote(JudgeActor).options(**self.place.options)
        self.actor = made.remote(self.judge, api_key=self._api_key, ports=self._ports)
        port = urlsplit(self.url).port
        self.url = await asyncio.wait_for(self.actor.hold_address.remote(port), deadline_seconds)

    async def load(self, deadline_seconds: float) -> None:
        """Wait until the model is loaded and the server says so at its address."""
        where = await asyncio.wait_for(self.actor.start.remote(), deadline_seconds)
        headers = {"authorization": f"Bearer {self._api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=ANSWER_SECONDS, trust_env=False) as client:
            answer = await client.get(f"{self.url}/models")
        served = [model["id"] for model in answer.json()["data"]] if answer.status_code == 200 else []
        if served != [self.judge.model]:
            raise EngineError(f"its server says {answer.status_code}: {answer.text[:200]}")
        self.place.was_good()
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
        self._tell: list[Callable[[Mapping[str, Sequence[str]]], None]] = []
        self._told: Mapping[str, Sequence[str]] = {}
        self._may_load = asyncio.Event()
        self._background = BackgroundLoop("judges")
        self._loop = self._background.loop

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

        `placement` has the options of each actor; `cfg` says from which ports the servers take one. Raises what
        `Starts.wait` does when too few copies of a judge get an address. The models load after `load` is called.
        """
        api_key = os.environ.get("VLLM_API_KEY") or secrets.token_hex(32)
        ports = (cfg.port_range_low, cfg.port_range_high)
        copies = [(judge, number) for judge in judges for number in range(judge.num_copies)]
        engines = [
            JudgeEngine(judge, options, number=number, api_key=api_key, ports=ports)
            for (judge, number), options in zip(copies, placement, strict=True)
        ]
        started = cls(engines, api_key, cfg, deadlines)
        for engine in engines:
            started.starts.watch(engine.name, started._watch(engine), started._loop)
        started._wait(NUM_DEADLINES * deadlines.placement)
        return started

    def addresses(self) -> dict[str, list[str]]:
        """Return the base URLs of every judge by the name of its instance: of the copies that are up, else of all."""
        missing = self.starts.missing()
        found: dict[str, list[JudgeEngine]] = {}
        for engine in self._engines:
            if engine.url:
                found.setdefault(engine.judge.name, []).append(engine)
        up = {name: [copy.url for copy in copies if copy.name not in missing] for name, copies in found.items()}
        return {name: up[name] or [copy.url for copy in copies] for name, copies in found.items()}

    def subscribe(self, tell: Callable[[Mapping[str, Sequence[str]]], None]) -> None:
        """Tell somebody the addresses: now, and after each change, by another thread. `tell` must not block."""

        async def begin() -> None:
            self._tell.append(tell)
            tell(self.addresses())

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result()

    def load(self) -> None:
        """Load the models and watch the engines from then on; raises as `launch` does when too few copies are up."""

        async def begin() -> None:
            for engine in self._engines:
                if engine.url:  # else it has none yet, or has been given up
                    self.starts.lost(engine.name, "its model has not been loaded yet")
            self._may_load.set()

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result()
        self._wait(NUM_DEADLINES * self._deadlines.engine_start)

    def shutdown(self) -> None:
        """Stop all engines, by force when they do not stop within the deadline."""
        self._background.end(self._deadlines.shutdown)
        actors = [engine.actor for engine in self._engines if engine.actor is not None]
        calls = [actor.shutdown.remote() for actor in actors]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=self._deadlines.shutdown)
        for actor in actors:
            ray.kill(actor)

    def _wait(self, seconds: float) -> None:
        """Wait until enough copies of each judge are up; else all actors end, and the error says who is missing."""
        try:
            self.starts.wait(seconds)
        except RecipeError:
            self.shutdown()
            raise

    def _tell_callers(self) -> None:
        """Tell everybody the addresses, when these have changed."""
        if (now := self.addresses()) != self._told:
            self._told = now
            for tell in self._tell:
                tell(now)

    async def _watch(self, engine: JudgeEngine) -> None:
        """Have a copy take an address and load its model, and replace its actor until it cannot be started again."""
        if not await self._start(engine, self._launch, self._launch):
            return
        if not self._may_load.is_set():
            self.starts.succeeded(engine.name)
            await self._may_load.wait()
        is_up = await self._start(engine, self._load, self._replace)
        while is_up:
            self.starts.succeeded(engine.name)
            self._tell_callers()
            try:
                while True:
                    await asyncio.wait_for(engine.actor.watch.remote(WATCH_SECONDS), WATCH_SECONDS + SILENCE_SECONDS)
            except Exception as error:  # whatever it is, the engine cannot be relied on
                lost = failure(str(engine), error, WATCH_SECONDS + SILENCE_SECONDS)
                self.starts.lost(engine.name, lost)
                self._tell_callers()
                logger.warning("%s", lost)
            is_up = await self._start(engine, self._replace, self._replace)
        if engine.url in self.addresses()[engine.judge.name]:
            logger.error("the questions that %s would be asked get no reply", engine)

    async def _start(self, engine: JudgeEngine, first: _Step, again: _Step) -> bool:
        """Start an actor with `first`, after each failure another with `again`; return whether one is up in the end."""
        step = first
        seconds = self._deadlines.engine_start if engine.url else self._deadlines.placement
        while True:
            try:
                await step(engine)
                return True
            except Exception as error:
                ray.kill(engine.actor)
                reason = failure(engine.name, error, seconds)
                node = await asyncio.to_thread(engine.place.node)
                if not self.starts.failed(engine.name, reason, node=node, wrong=wrong_input(error)):
                    return False
                where = await asyncio.to_thread(engine.place.move)
                logger.info("%s is started again %s", engine.name, where)
                step = again

    async def _launch(self, engine: JudgeEngine) -> None:
        await engine.launch(self._deadlines.placement)

    async def _load(self, engine: JudgeEngine) -> None:
        await engine.load(self._deadlines.engine_start)

    async def _replace(self, engine: JudgeEngine) -> None:
        ray.kill(engine.actor)
        await self._launch(engine)
        await self._load(engine)
