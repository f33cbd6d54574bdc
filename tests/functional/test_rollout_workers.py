"""The driver's handle on rollout workers with real actors: who is given groups, and who is given up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from policy_case import local_ray
from speed import patiently

from recipes.errors import EngineError
from recipes.generation.clients.client import OpenEngines
from recipes.rollouts import workers
from recipes.rollouts.workers import RolloutWorkers
from tests.configuration import block, config

pytestmark = pytest.mark.functional

CONFIG = config(deadlines=block("deadlines", engine_start=120.0, shutdown=20.0))


class Engines:
    """Tells a client of engines as `Generation` does: at once, and never again."""

    def subscribe(self, tell: Callable[[OpenEngines], None]) -> None:
        tell(OpenEngines())

    def forget(self, client: str) -> None:
        pass


def slow_to_hear() -> type:
    """Return a class that Ray sends by value: its processes need not import this module."""

    class SlowToHear:
        """A rollout worker that hears of the engines late; its groups fail until it has."""

        def __init__(self, config: Any, *, name: str, num_workers: int, num_on_node: int) -> None:
            self._knows = False

        async def ping(self) -> None:
            pass

        async def follow(self, engines: OpenEngines) -> None:
            await asyncio.sleep(1.0)
            self._knows = engines.number == 0

        async def run_group(self, request: int) -> tuple[Any, Any]:
            if not self._knows:
                raise EngineError("generation engine 0 is not known yet")
            return SimpleNamespace(headers=os.getpid(), warnings=[]), request

        async def close(self) -> None:
            pass

    return SlowToHear


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with local_ray(num_cpus=1):
        yield


def test_a_group_waits_until_its_worker_knows_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RolloutWorker", slow_to_hear())
    all_workers = RolloutWorkers(CONFIG, [{"num_cpus": 0}])
    all_workers.connect(Engines())

    async def run() -> list[Any]:
        pids: list[Any] = [(await all_workers.run_group(cast(Any, 1)))[0]]
        os.kill(pids[0], signal.SIGKILL)
        return [*pids, (await all_workers.run_group(cast(Any, 2)))[0]]

    try:
        first, again = asyncio.run(run())
    finally:
        all_workers.close()
    assert first != again
    assert all_workers.num_lost == 1


def test_a_worker_that_hangs_is_replaced_and_its_groups_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RolloutWorker", slow_to_hear())
    all_workers = RolloutWorkers(CONFIG, [{"num_cpus": 0}])
    all_workers.connect(Engines())

    async def run() -> tuple[Any, list[Any]]:
        first, _ = await all_workers.run_group(cast(Any, 1))
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr(workers, "CHECK_SECONDS", 1.0)
        monkeypatch.setattr(workers, "SILENCE_SECONDS", patiently(2.0))
        return first, list(await asyncio.gather(*(all_workers.run_group(cast(Any, number)) for number in range(8))))

    try:
        first, groups = asyncio.run(run())
    finally:
        all_workers.close()
    assert all(pid != first for pid, _ in groups)
    assert all_workers.num_lost == 1
    psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], timeout=patiently(20))
    assert not psutil.pid_exists(first), "what hangs holds its node's memory and containers"
