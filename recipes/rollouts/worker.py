"""The actor that runs rollouts: codec, agents, verifiers' clients and scoring processes, on one event loop.

It samples on the engines directly. A finished group leaves it as two objects: the headers, which the driver reads, and
the tokens, which lie in the object store until a rank of the policy fetches them. The driver owns both, so they outlive
this process.
"""

from __future__ import annotations

import asyncio

from recipes.config.keys.derive import derive
from recipes.config.tree import Config
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.generation.client import FollowingClient, OpenEngines
from recipes.rollouts.group import GroupRequest, GroupRunner
from recipes.tokens import GroupTokens, pack_rollouts
from recipes.types import RolloutHeader


class RolloutWorker:
    """A Ray actor. Every method is a coroutine on the actor's one event loop."""

    def __init__(self, config: Config, *, name: str, num_workers: int) -> None:
        """`name` is this process's own among all that sample; `num_workers` share the limits of the judges."""
        cfg = config.policy.generation
        self._environments = Environments.from_config(
            config.env, ChatCodec.from_config(config.policy), num_sharers=num_workers
        )
        self._engines = FollowingClient(
            name,
            derive(config).num_engines,
            max_model_len=cfg.vllm_cfg.max_model_len,
            deadline_seconds=config.deadlines.generation,
        )
        self._groups = GroupRunner(
            sampler=self._engines,
            runner=self._environments,
            max_model_len=cfg.vllm_cfg.max_model_len,
            rollout_seconds=config.deadlines.rollout,
        )

    async def ping(self) -> None:
        """Return when the event loop comes to it."""

    async def follow(self, engines: OpenEngines) -> None:
        """Sample on these engines from now on."""
        self._engines.follow(engines)

    async def run_group(self, request: GroupRequest) -> tuple[tuple[RolloutHeader, ...], GroupTokens]:
        """Return the headers and the tokens of a group; raises `EngineError` when no engine is left."""
        return pack_rollouts(await self._groups.run(request))

    async def close(self) -> None:
        """End the scoring processes, the sandbox and the connections."""
        await asyncio.to_thread(self._environments.close)
