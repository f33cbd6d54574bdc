"""A group never reaches a worker before the engines that it is to use: Ray keeps no order of an actor's calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.generation.clients.client import OpenEngines
from recipes.rollouts import workers as workers_module
from recipes.rollouts.group import GroupRequest
from recipes.rollouts.workers import GroupReport, RolloutWorkers
from recipes.types import Sampling
from tests.configuration import config

SECONDS = 30.0  # far more than any wait here takes


class Actor:
    """Learns of engines when the test says so; runs a group at once."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.may_learn = asyncio.Event()
        self.follow = SimpleNamespace(remote=lambda engines: asyncio.ensure_future(self._follow(engines)))
        self.run_group = SimpleNamespace(options=lambda **_options: SimpleNamespace(remote=self._run_group))

    async def _follow(self, engines: OpenEngines) -> None:
        await self.may_learn.wait()
        self.happened.append(f"engines {engines.number}")

    def _run_group(self, _request: GroupRequest) -> tuple[Any, str]:
        self.happened.append("group")
        report: asyncio.Future[GroupReport] = asyncio.get_running_loop().create_future()
        report.set_result(GroupReport(headers=(), warnings=[]))
        return report, "tokens"


async def test_a_group_waits_until_its_worker_knows_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor()
    remote: Any = SimpleNamespace(options=lambda **_options: SimpleNamespace(remote=lambda *_args, **_kwargs: actor))
    monkeypatch.setattr(workers_module.ray, "remote", lambda _class: remote)
    workers = RolloutWorkers(config(), [{}])
    workers._workers[0].is_up = True
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
    request = GroupRequest(row={}, sampling=sampling, affinity=0, num_rollouts=2)
    workers._tell(OpenEngines(number=3))
    groups = [asyncio.create_task(workers.run_group(request)) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert actor.happened == []
    actor.may_learn.set()
    assert await asyncio.wait_for(asyncio.gather(*groups), SECONDS) == [((), "tokens")] * 2
    assert actor.happened == ["engines 3", "group", "group"]
    assert await asyncio.wait_for(workers.run_group(request), SECONDS) == ((), "tokens")
