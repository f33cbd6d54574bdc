"""One engine of a judge: a Ray actor around vLLM's `AsyncLLM` and its OpenAI-compatible server.

A judge keeps the weights of its files: nothing is pushed to it. Its address is held from the first call on, so that the
environments can be told it while the model still loads; what connects until then waits.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from recipes.cluster.ports import hold, hold_in_range
from recipes.errors import ConfigError, EngineError, LaunchError, Problem
from recipes.generation.engine_args import CPU_ENV, ENV

if TYPE_CHECKING:
    from recipes.config.keys.judges import StartedJudge

PORT_SECONDS = 20.0
_POLL_SECONDS = 0.5


class JudgeActor:
    """Holds one `AsyncLLM`. Every method is a coroutine on the actor's one event loop."""

    def __init__(self, judge: StartedJudge, *, api_key: str, ports: tuple[int, int]) -> None:
        """`ports` is the half-open range from which the server takes one."""
        self._judge, self._api_key, self._ports = judge, api_key, ports
        self._name = f"judge {judge.name}"
        # These must be set before torch and vLLM are imported. The EngineCore process inherits them.
        os.environ.update(judge.variables)
        for name, value in (ENV if ray.get_gpu_ids() else {**ENV, **CPU_ENV}).items():
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
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        self._server = await HttpServer.serve(
            self._llm, args, held=self._socket, api_key=self._api_key, count=_uncounted
        )
        self._name += f" (node {socket.gethostname()}, actor pid {os.getpid()})"
        return self._name

    async def watch(self, seconds: float) -> None:
        """Return after `seconds`; raises `EngineError` as soon as the EngineCore process has ended."""
        for _ in range(max(1, round(seconds / _POLL_SECONDS))):
            if self._llm.errored:
                raise EngineError(f"{self._name} is dead: its EngineCore process ended")
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
