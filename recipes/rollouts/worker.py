"""The actor that runs rollouts: codec, agents, verifiers' clients and scoring processes, on one event loop.

It samples on the engines directly. A finished group leaves it as two objects: the headers, which the driver reads, and
the tokens, which lie in the object store until a rank of the policy fetches them. The driver owns both, so they outlive
this process.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from recipes.config.keys.derive import derive
from recipes.config.tree import Config
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.swe.containers import places
from recipes.generation.clients.client import FollowingClient, OpenEngines
from recipes.rollouts.group import GroupRequest, GroupRunner
from recipes.tokens import GroupTokens, pack_rollouts
from recipes.types import RolloutHeader

MAX_WARNINGS = 20  # that travel with one group; a warning of every rollout would be many
_SHOWN_CHARACTERS = 2000  # of one


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """What the driver reads of a finished group."""

    headers: tuple[RolloutHeader, ...]
    warnings: list[str]  # of the worker, since its last report


class Warnings(logging.Handler):
    """Keeps what this process warns of until the driver takes it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < MAX_WARNINGS:
            self._lines.append(self.format(record)[:_SHOWN_CHARACTERS])

    def take(self) -> list[str]:
        """Return what has been kept since the last call."""
        taken, self._lines = self._lines, []
        return taken


class RolloutWorker:
    """A Ray actor. Every method is a coroutine on the actor's one event loop."""

    def __init__(self, config: Config, *, name: str, num_workers: int, num_on_node: int) -> None:
        """`name` is this process's own among all that sample.

        `num_workers` share the limits of the judges, and `num_on_node` of them the cores of this machine.
        """
        logging.basicConfig(level=logging.WARNING)
        self._warnings = Warnings()
        logging.getLogger("recipes").addHandler(self._warnings)
        cfg = config.policy.generation
        self._environments = Environments.from_config(
            config.env, ChatCodec.from_config(config.policy), num_sharers=num_workers, num_on_node=num_on_node
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

    async def run_group(self, request: GroupRequest) -> tuple[GroupReport, GroupTokens]:
        """Return what the driver is told of a group, and its tokens; raises `EngineError` when no engine is left."""
        headers, tokens = pack_rollouts(await self._groups.run(request))
        return GroupReport(headers=headers, warnings=self._warnings.take()), tokens

    async def close(self) -> None:
        """End the scoring processes, the sandbox and the connections; remove the containers' files."""
        await asyncio.to_thread(self._environments.close)
        await asyncio.to_thread(places.leave)
