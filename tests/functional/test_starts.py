"""Engines and rollout workers that fail to start, on real Ray: they are started again, or the run begins without."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_engine
from speed import patiently

from recipes.cluster.placement import WorkerCounts, place
from recipes.cluster.private import private_ray
from recipes.errors import EngineError, RunError
from recipes.generation import generation as generation_module
from recipes.generation.clients.client import OpenEngines
from recipes.generation.generation import Generation
from recipes.rollouts import workers as workers_module
from recipes.rollouts.workers import RolloutWorkers
from recipes.types import Sampling
from tests.configuration import block, config

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    with private_ray(2, resources={"worker_units": 32}):
        yield


def failing_engines(note: Path, num_faults: dict[int, int]) -> type:
    """Return a real engine's actor whose first starts fail: of each engine as many as `num_faults` says.

    A later start waits until the file "go on" is there, so that the run begins without that engine on any machine.
    Ray sends the class by value: its processes need not import this module.
    """
    actor = generation_module.EngineActor

    class Failing(actor):  # type: ignore[misc, valid-type]
        async def start(self) -> Any:
            with (note / str(self._index)).open("a+", encoding="utf-8") as lines:
                lines.write("start\n")
                lines.seek(0)
                num_starts = len(lines.readlines())
            if num_starts <= num_faults.get(self._index, 0):
                raise EngineError(f"generation engine {self._index}: planted in start {num_starts}")
            while num_starts > 1 and not (note / "go on").exists():
                await asyncio.sleep(0.1)
            return await super().start()

    return Failing


def start(path: Path, monkeypatch: pytest.MonkeyPatch, num_faults: dict[int, int], **keys: Any) -> Generation:
    """Start two tiny engines that share a node with more units."""
    tiny_engine.build_model(path, seed=0, is_tied=True, eos=None)
    note = path / "starts"
    note.mkdir()
    monkeypatch.setattr(generation_module, "EngineActor", failing_engines(note, num_faults))
    counts = WorkerCounts(num_train_nodes=1, train_workers_per_node=1, num_engines=2, units_per_engine=1)
    return Generation.start(
        tiny_engine.generation_config(**keys),
        model_path=str(path),
        seed=1,
        placement=place(counts, deadline_seconds=patiently(20)).engines,
        deadlines=tiny_engine.deadlines(),
        loads_weights=False,
    )


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + patiently(120)
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def sample(generation: Generation, engine: int) -> int:
    """Return how many tokens an engine samples, which is asked by its number."""
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=4)
    return len(asyncio.run(generation.generate((5, 6, 7), sampling, affinity=engine)).token_ids)


def test_a_run_begins_while_an_engine_is_started_again_elsewhere_and_it_joins_at_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    generation = start(tmp_path, monkeypatch, {1: 1}, min_share_up=0.5)
    try:
        assert "the run begins without generation engine 1: start 1 of 2 failed on node" in caplog.text
        assert generation.infos[0].index == 0
        model = tiny_engine.load(tmp_path)
        weights = tiny_engine.WeightFile(tmp_path / "weights", model)
        weights.write(model)
        generation.connect_weights(weights.layout)
        generation.update_weights(0)
        assert sample(generation, engine=0) == 4
        (tmp_path / "starts" / "go on").touch()
        wait_until(lambda: not generation.starts.missing(), "engine 1 was not started again")
        assert "generation engine 1 is started again at another place, on node" in caplog.text, "there are free units"
        assert generation.needs_connect(weights.layout)
        generation.connect_weights(weights.layout)
        generation.update_weights(1)
        assert generation.num_engines_alive == 2
        assert sample(generation, engine=1) == 4
        assert generation.starts.num_failed == 1
    finally:
        generation.shutdown()


def test_a_run_begins_without_an_engine_that_never_starts_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = start(tmp_path, monkeypatch, {0: 9}, min_share_up=0.5)
    try:
        wait_until(lambda: generation.starts.num_failed == 2, "the second start of engine 0 was not counted")
        [(name, reason)] = generation.starts.missing().items()
        assert name == "generation engine 0"
        assert re.fullmatch(r"start 2 of 2 failed on node \S+: planted in start 2", reason)
        assert generation.num_ranks == 1
    finally:
        generation.shutdown()


def test_too_few_engines_are_one_error_that_names_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"0 of 2 are up, and 2 must be \(policy.generation.min_share_up 1\)") as raised:
        start(tmp_path, monkeypatch, {0: 9, 1: 9})
    for engine in range(2):
        reason = rf"generation engine {engine}: start [12] of 2 failed on node \S+: planted in start [12]"
        assert re.search(reason, str(raised.value))


def failing_workers(note: Path, num_faults: int) -> type:
    """Return a rollout worker whose actor cannot be made the first times."""

    class Failing:
        def __init__(self, _config: Any, *, name: str, num_workers: int, num_on_node: int) -> None:
            with note.open("a+", encoding="utf-8") as lines:
                lines.write(f"{name}\n")
                lines.seek(0)
                num_starts = len(lines.readlines())
            if num_starts <= num_faults:
                raise FileNotFoundError("/mount/data is not there")
            self._name = name

        async def follow(self, _engines: OpenEngines) -> None: ...

        async def run_group(self, request: Any) -> tuple[Any, Any]:
            return SimpleNamespace(headers=self._name, warnings=[]), request

        async def close(self) -> None: ...

    return Failing


class Engines:
    """Tells a client of engines once."""

    def subscribe(self, tell: Callable[[OpenEngines], None]) -> None:
        tell(OpenEngines())

    def forget(self, _client: str) -> None: ...


def test_a_rollout_worker_that_fails_to_start_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = config(
        deadlines=block("deadlines", engine_start=patiently(60.0), shutdown=10.0),
        policy=block("policy", generation=block("policy.generation", max_starts=2, min_share_up=0.95)),
    )
    monkeypatch.setattr(workers_module, "RolloutWorker", failing_workers(tmp_path / "starts", 1))
    workers = RolloutWorkers(short, [{"num_cpus": 0}])
    try:
        workers.connect(Engines())
        assert workers.starts.num_failed == 1
        assert asyncio.run(workers.run_group(cast(Any, 1)))[0] == "rollout-worker-0.2"
    finally:
        workers.close()
    monkeypatch.setattr(workers_module, "RolloutWorker", failing_workers(tmp_path / "more", 9))
    workers = RolloutWorkers(short, [{"num_cpus": 0}])
    try:
        with pytest.raises(RunError, match=r"rollout worker 0: start 2 of 2 failed.*/mount/data is not there"):
            workers.connect(Engines())
    finally:
        workers.close()


def slow_worker(note: Path) -> type:
    """Return a rollout worker of which the second is up once the file "go on" is there, and that says whom it asks."""

    class Slow:
        def __init__(self, _config: Any, *, name: str, num_workers: int, num_on_node: int) -> None:
            self._name = name

        async def follow(self, _engines: OpenEngines) -> None:
            while self._name.startswith("rollout-worker-1") and not (note / "go on").exists():
                await asyncio.sleep(0.1)

        async def ask_judges_at(self, _number: int, addresses: Any) -> None:
            (note / self._name).write_text(str(addresses), encoding="utf-8")

        async def ping(self) -> None: ...

        async def run_group(self, request: Any) -> tuple[Any, Any]:
            return SimpleNamespace(headers=self._name, warnings=[]), request

        async def close(self) -> None: ...

    return Slow


def test_a_run_begins_without_a_slow_rollout_worker_which_takes_groups_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = config(
        deadlines=block("deadlines", engine_start=patiently(300.0), shutdown=10.0),
        policy=block("policy", generation=block("policy.generation", max_starts=2, min_share_up=0.5)),
    )
    monkeypatch.setattr(workers_module, "RolloutWorker", slow_worker(tmp_path))
    workers = RolloutWorkers(slow, [{"num_cpus": 0}] * 2)
    try:
        workers.connect(Engines())
        assert workers.starts.missing() == {"rollout worker 1": "its first start has not ended"}
        assert asyncio.run(workers.run_group(cast(Any, 1)))[0] == "rollout-worker-0.1"
        workers.ask_judges_at({"grader": ["http://n1:3000/v1"]})
        (tmp_path / "go on").touch()
        wait_until(lambda: not workers.starts.missing(), "the slow worker did not come up")
        workers._workers[0].num_groups = 1
        assert asyncio.run(workers.run_group(cast(Any, 1)))[0] == "rollout-worker-1.1"
        for name in ("rollout-worker-0.1", "rollout-worker-1.1"):
            wait_until((tmp_path / name).exists, f"{name} was not told where the judges are")
    finally:
        workers.close()
