"""Engines that answer with random tokens: actor, connections and sessions are the real ones, but there is no vLLM.

The length of an answer is log-normal, and its tokens come at the speed of one sequence on an engine, `TIME_SCALE` times
as fast. The same request gets the same answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

from recipes.cluster.ports import hold_in_range
from recipes.generation.serving.listener import Listener
from recipes.generation.serving.mailboxes import Mailboxes
from recipes.generation.serving.requests import Request, Sample, request_seed
from recipes.generation.serving.sessions import Tokens

if TYPE_CHECKING:
    from recipes.config.tree import Config
    from recipes.generation.engine import EngineInfo
    from recipes.generation.generation import Generation

TOKENS_PER_SECOND = 60.0  # of one sequence
TIME_SCALE = 1000.0
SIGMA = 1.0  # spread of the logarithm of a length


class RandomEngine:
    """A Ray actor in the place of an engine's."""

    def __init__(self, index: int, *, mean_tokens: float, num_ids: int, ports: tuple[int, int]) -> None:
        """Ids are below `num_ids`; `it listens on one of `ports`: the first, and the end of the range."""
        self._ports = ports
        self._index, self._mean_tokens, self._num_ids = index, mean_tokens, num_ids
        self._mailboxes = Mailboxes(self)
        self._totals = dict.fromkeys(("requests", "prompt_tokens", "generated_tokens"), 0.0)

    async def start(self) -> EngineInfo:
        """Return where it runs."""
        import numpy  # noqa: F401  loaded before anything is measured

        from recipes.generation.engine import EngineInfo

        self._listener = await Listener.start(self._mailboxes, hold_in_range(*self._ports, host="127.0.0.1"))
        self._info = EngineInfo(
            index=self._index,
            node=socket.gethostname(),
            pid=os.getpid(),
            core_pids=(),
            address=self._listener.address,
            base_url=None,
            api_key=None,
            import_seconds=0.0,
            engine_seconds=0.0,
            server_seconds=0.0,
        )
        return self._info

    def __str__(self) -> str:
        return str(self._info)

    async def forget(self, client: str) -> None:
        """End every request and every session of a client."""
        self._mailboxes.forget(client)

    @property
    def is_dead(self) -> bool:
        """It never dies."""
        return False

    async def set_mean(self, mean_tokens: float) -> None:
        """Answer with so many tokens in the mean from now on."""
        self._mean_tokens = mean_tokens

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        """Return random tokens once their time has passed."""
        import numpy as np

        rng = np.random.default_rng(request_seed(0, request, prompt.ids))
        length = rng.lognormal(np.log(self._mean_tokens) - SIGMA**2 / 2, SIGMA)
        count = int(np.clip(length, 1, request.sampling.max_tokens))
        await asyncio.sleep(count / TOKENS_PER_SECOND / TIME_SCALE)
        self._totals["requests"] += 1
        self._totals["prompt_tokens"] += len(prompt.values)
        self._totals["generated_tokens"] += count
        return Sample(
            token_ids=rng.integers(0, self._num_ids, count, dtype=np.int32).tobytes(),
            logprobs=(-rng.random(count, dtype=np.float32)).tobytes(),
            versions=((0, 0, count),),
            finish_reason="stop" if count < request.sampling.max_tokens else "length",
        )

    async def stats(self) -> dict[str, float]:
        """Return running totals."""
        return dict(self._totals)

    async def shutdown(self) -> None:
        """Do nothing: the process is all there is."""


def start_engines(config: Config, count: int, *, mean_tokens: float, num_ids: int) -> tuple[Generation, list[Any]]:
    """Start engines under the real handle; return it with their actors."""
    import ray

    from recipes.generation.generation import Generation
    from recipes.generation.handle import EngineHandle

    remote, cfg = ray.remote(RandomEngine).options(num_cpus=0), config.policy.generation
    ports = cfg.port_range_low, cfg.port_range_high

    def make_actor(index: int) -> Any:
        return remote.remote(index, mean_tokens=mean_tokens, num_ids=num_ids, ports=ports)

    handles = [EngineHandle(index, make_actor) for index in range(count)]
    for handle, info in zip(handles, ray.get([handle.launch() for handle in handles], timeout=300), strict=True):
        handle.started(info)
    generation = Generation(handles, vllm_cfg=cfg.vllm_cfg, deadlines=config.deadlines, loads_weights=True)
    return generation, [handle.actor for handle in handles]
