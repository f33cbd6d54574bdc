"""What happens when an engine is late, stopped or killed. One module-wide pair of engines; the tests run in order."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import ray
import tiny_engine

from recipes.errors import EngineError
from recipes.generation.generation import GRACE_SECONDS, Generation
from recipes.types import Completion, Sampling

pytestmark = pytest.mark.functional

LIMITS: SimpleNamespace = tiny_engine.deadlines()
LONG = Sampling(temperature=1.0, top_p=1.0, max_tokens=480)
SHORT = Sampling(temperature=1.0, top_p=1.0, max_tokens=4)
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generation]:
    path = tmp_path_factory.mktemp("model")
    tiny_engine.build_model(path, seed=0, is_tied=True, eos=None)
    with tempfile.TemporaryDirectory(prefix="ray_") as directory:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=directory, logging_level="ERROR", log_to_driver=False)
        generation = Generation.start(
            tiny_engine.generation_config(),
            model_path=str(path),
            seed=1,
            placement=[{"num_cpus": 0}, {"num_cpus": 0}],
            deadlines=LIMITS,
        )
        yield generation
        generation.shutdown()
        ray.shutdown()


def generate(generation: Generation, sampling: Sampling, *, engine: int) -> Completion:
    return asyncio.run(generation.generate(PROMPT, sampling, affinity=engine))


def is_named(generation: Generation, engine: int, message: str) -> bool:
    """Whether the message says which engine, on which node, with which process ids."""
    info = generation.infos[engine]
    return all(part in message for part in (f"engine {engine}", info.node, str(info.pid), str(info.core_pids[0])))


def wait_until_gone(pid: int, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there after {seconds} s"
        time.sleep(0.05)


def test_engines_do_not_repeat_each_other(pair: Generation) -> None:
    assert generate(pair, LONG, engine=0).token_ids != generate(pair, LONG, engine=1).token_ids


def test_a_late_request_is_aborted_in_the_engine(pair: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "generation", 0.1)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer within 0\.1 s") as raised:
        generate(pair, LONG, engine=0)
    assert time.monotonic() - began < 5
    assert is_named(pair, 0, str(raised.value))
    assert pair.stats()[0]["running"] == 0
    monkeypatch.undo()
    assert len(generate(pair, SHORT, engine=0).token_ids) == 4


def test_a_cancelled_request_is_aborted_in_the_engine(pair: Generation) -> None:
    async def cancel() -> None:
        tasks = [asyncio.create_task(pair.generate(PROMPT, LONG, affinity=0)) for _ in range(2)]
        await asyncio.sleep(0.1)
        tasks[0].cancel()  # the other one still wants its answer
        await asyncio.wait([tasks[0]])
        await asyncio.sleep(0.1)
        assert (await asyncio.to_thread(pair.stats))[0]["running"] == 2
        tasks[1].cancel()
        await asyncio.wait(tasks)
        for _ in range(100):
            if (await asyncio.to_thread(pair.stats))[0]["running"] == 0:
                return
            await asyncio.sleep(0.05)
        pytest.fail("the requests nobody wants still run")

    asyncio.run(cancel())


def test_a_prompt_without_room_for_an_answer_is_refused(pair: Generation) -> None:
    with pytest.raises(ValueError, match="prompt has 512 tokens"):
        asyncio.run(pair.generate((5,) * 512, SHORT, affinity=0))


def test_a_hanging_actor_is_given_up(pair: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "generation", 0.5)
    os.kill(pair.infos[1].pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(EngineError, match="no answer within") as raised:
            generate(pair, SHORT, engine=1)
        assert time.monotonic() - began < 0.5 + GRACE_SECONDS + 3
    finally:
        os.kill(pair.infos[1].pid, signal.SIGCONT)
    assert is_named(pair, 1, str(raised.value))


async def killed(generation: Generation, pid: int, *, engine: int) -> str:
    """Kill a process while its engine generates; return the error of the request."""
    task = asyncio.create_task(generation.generate(PROMPT, LONG, affinity=engine))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError) as raised:
        await task
    assert time.monotonic() - began < 30
    return str(raised.value)


def test_a_killed_engine_core_fails_its_requests_at_once(pair: Generation) -> None:
    pair.check_health()
    assert is_named(pair, 0, asyncio.run(killed(pair, pair.infos[0].core_pids[0], engine=0)))
    with pytest.raises(EngineError) as raised:
        pair.check_health()
    assert is_named(pair, 0, str(raised.value))
    with pytest.raises(EngineError):
        pair.update_weights(1)


def test_a_killed_actor_fails_its_requests_and_leaves_no_process(pair: Generation) -> None:
    info = pair.infos[1]
    [raylet] = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]

    async def kill_both() -> str:
        failing = asyncio.create_task(killed(pair, info.pid, engine=1))
        raylet.suspend()  # it would clean up; a node that loses its raylet too must not depend on that
        try:
            await asyncio.to_thread(wait_until_gone, info.core_pids[0], seconds=10)
        finally:
            raylet.resume()
        return await failing

    assert is_named(pair, 1, asyncio.run(kill_both()))
    with pytest.raises(EngineError):
        generate(pair, SHORT, engine=1)
