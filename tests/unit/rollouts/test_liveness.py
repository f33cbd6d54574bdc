"""How the driver waits for a rollout worker: many groups share its pings, and its silence ends every wait."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from recipes.rollouts import workers
from recipes.rollouts.workers import Liveness, RolloutWorkers, _Worker


class Actor:
    """Answers pings at once, or never; counts them."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self.num_pings, self._is_silent = 0, is_silent
        self.ping = SimpleNamespace(remote=self._ping)

    async def _ping(self) -> None:
        self.num_pings += 1
        if self._is_silent:
            await asyncio.Event().wait()


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "answer"


async def test_groups_of_one_worker_share_its_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_SECONDS", 0.1)
    actor = Actor()
    liveness = Liveness(actor)
    assert set(await asyncio.gather(*(liveness.result(after(0.5)) for _ in range(500)))) == {"answer"}
    assert 1 <= actor.num_pings < 500, "each group asks for itself"


async def test_every_group_of_a_silent_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(workers, "SILENCE_SECONDS", 0.1)
    actor = Actor(is_silent=True)
    liveness = Liveness(actor)
    waits = [liveness.result(after(3600)) for _ in range(20)]
    assert {type(outcome) for outcome in await asyncio.gather(*waits, return_exceptions=True)} == {TimeoutError}
    assert actor.num_pings == 1


async def test_a_silent_worker_is_named_before_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(workers, "NOTED_SECONDS", 0.1)
    all_workers = object.__new__(RolloutWorkers)
    all_workers._workers = [_Worker(index) for index in range(3)]
    for worker, is_silent in zip(all_workers._workers, (False, True, True), strict=True):
        worker.liveness, worker.is_up = Liveness(Actor(is_silent=is_silent)), worker.index < 2
    waits = [asyncio.ensure_future(worker.liveness.result(after(3600))) for worker in all_workers._workers]
    async with asyncio.timeout(30):
        while not (silent := all_workers.silent()):
            await asyncio.sleep(0.02)
    assert list(silent) == ["rollout worker 1"], "the third is not up, which is said elsewhere"
    assert silent["rollout worker 1"] == "has not answered for 0 s"
    for wait in waits:
        wait.cancel()
