"""What happens when a request or an engine is late, stopped or killed. One pair of engines; the tests run in order."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import psutil
import pytest
import ray
import tiny_engine
import torch
from speed import patiently
from transformers import PreTrainedModel

from recipes.cluster.private import private_ray
from recipes.errors import EngineError, RequestError
from recipes.generation.clients import router
from recipes.generation.clients.router import EngineSession
from recipes.generation.engine import EngineInfo
from recipes.generation.generation import Generation
from recipes.generation.serving.outstanding import Tokens
from recipes.generation.serving.requests import Request, to_bytes
from recipes.types import Completion, Sampling

pytestmark = pytest.mark.functional

LIMITS: SimpleNamespace = tiny_engine.deadlines()
LONG = Sampling(temperature=1.0, top_p=1.0, max_tokens=480)
SHORT = Sampling(temperature=1.0, top_p=1.0, max_tokens=4)
PROMPT = (5, 6, 7)


@dataclass
class Pair:
    """Two engines and the weights that are pushed to them."""

    generation: Generation
    model: PreTrainedModel
    weights: tiny_engine.WeightFile
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def push(self, version: int) -> None:
        """Push the same weights again, as `refit` does."""
        if self.generation.needs_connect(self.weights.layout):
            self.generation.connect_weights(self.weights.layout)
        self.generation.update_weights(version)

    def start(self, sampling: Sampling, *, engine: int, sample: int = -1) -> asyncio.Task[Completion]:
        """Ask an engine; 2 and 3 name engines 0 and 1 as well, for a prompt that was never sampled on the other."""
        number = next(self.numbers) if sample < 0 else sample
        work = self.generation.generate(PROMPT, sampling, affinity=engine, sample=(number,))
        return asyncio.get_running_loop().create_task(work)

    def generate(self, sampling: Sampling, *, engine: int, sample: int = -1) -> Completion:
        async def one() -> Completion:
            return await self.start(sampling, engine=engine, sample=sample)

        return asyncio.run(one())

    def wait_for_start(self, engine: int, dead: EngineInfo) -> EngineInfo:
        """Wait until another actor runs the engine."""
        deadline = time.monotonic() + patiently(180)
        while self.generation.infos[engine].pid == dead.pid:
            assert time.monotonic() < deadline, f"engine {engine} was not started again"
            time.sleep(0.1)
        return self.generation.infos[engine]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("model")
    tiny_engine.build_model(path, seed=0, is_tied=True, eos=None)
    with private_ray(2):
        generation = Generation.start(
            tiny_engine.generation_config(),
            model_path=str(path),
            seed=1,
            placement=[{"num_cpus": 0}, {"num_cpus": 0}],
            deadlines=LIMITS,
            loads_weights=False,
        )
        model = tiny_engine.load(path)
        weights = tiny_engine.WeightFile(path / "weights", model)
        weights.write(model)
        pair = Pair(generation, model, weights)
        pair.push(0)
        yield pair
        generation.shutdown()


def is_named(info: EngineInfo, message: str) -> bool:
    """Whether the message says which engine, on which node, with which process ids."""
    return all(part in message for part in (f"engine {info.index}", info.node, str(info.pid), str(info.core_pids[0])))


def wait_until_gone(pid: int, *, seconds: float) -> None:
    deadline = time.monotonic() + patiently(seconds)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there after {seconds} s"
        time.sleep(0.05)


def test_engines_wait_for_the_tensors_that_the_policy_has_not_written_yet(pair: Pair) -> None:
    may_end = threading.Event()
    num_before = len(pair.weights.layout.names)
    tiny_engine.perturb(pair.model, seed=1, scale=0.05)
    with ThreadPoolExecutor(2) as pool:
        pushing = pool.submit(pair.generation.update_weights, 1, num_before=num_before)
        writing = pool.submit(pair.weights.write, pair.model, lambda: may_end.wait(60), num_before=num_before)
        with pytest.raises(TimeoutError):
            pushing.result(timeout=0.5)
        may_end.set()
        writing.result()
        pushing.result()
    for engine in (0, 1):
        completion = pair.generate(LONG, engine=engine)
        expected = tiny_engine.logprobs(pair.model, PROMPT, completion.token_ids)
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4
        assert {span.version for span in completion.versions} == {1}


def test_engines_do_not_repeat_each_other(pair: Pair) -> None:
    zero, one = (pair.generate(LONG, engine=engine, sample=0) for engine in (0, 1))
    assert zero.token_ids != one.token_ids


def test_a_sample_is_repeated_by_its_numbers_whatever_else_is_sampled(pair: Pair) -> None:
    async def among_others() -> Completion:
        others = [pair.start(LONG, engine=0) for _ in range(20)]
        await asyncio.sleep(0.05)
        completion = await pair.start(LONG, engine=0, sample=0)
        for other in others:
            other.cancel()
        return completion

    alone, other = (pair.generate(LONG, engine=0, sample=sample) for sample in (0, 1))
    crowded = asyncio.run(among_others())
    assert crowded.token_ids == alone.token_ids != other.token_ids
    assert len(alone.token_ids) == LONG.max_tokens


def test_the_turns_of_a_session_are_sampled_like_whole_prompts(pair: Pair) -> None:
    """Also the turn after a push, one whose session the engine has forgotten, and one behind an engine that is gone."""
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=12)
    session = EngineSession()

    async def turn(prompt: tuple[int, ...], number: int, within: EngineSession | None) -> Completion:
        # Of no other test; the numbers of the sample and not the engine decide what is sampled.
        affinity, sample = 1_000_000, (0, number)
        return await pair.generation.generate(prompt, sampling, affinity=affinity, sample=sample, session=within)

    said: tuple[int, ...] = ()
    for number in range(7):
        if number == 3:
            pair.push(0)
        if number == 4:
            pair.generation.end(session)
        if number == 5:
            session.engine = 1 - (session.engine or 0)  # then all tokens are sent
        prompt = said + tuple(10 + (3 * number + index) % 80 for index in range(20))
        alone, completion = (asyncio.run(turn(prompt, number, within)) for within in (None, session))
        assert completion.token_ids == alone.token_ids and len(alone.token_ids) == sampling.max_tokens
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        said = prompt + completion.token_ids
    pair.generation.end(session)


def test_a_late_request_fails_alone_and_is_aborted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late_and_good() -> tuple[RequestError, Completion]:
        good = pair.start(LONG, engine=0)
        await asyncio.sleep(0.05)  # it was sent with the longer deadline
        monkeypatch.setattr(pair.generation._client, "deadline_seconds", 0.1)
        with pytest.raises(RequestError, match=r"did not answer within 0\.1 s \(deadlines\.generation\)") as raised:
            await pair.start(LONG, engine=0)
        return raised.value, await good

    began = time.monotonic()
    late, good = asyncio.run(late_and_good())
    assert time.monotonic() - began < patiently(10)
    assert is_named(pair.generation.infos[0], str(late))
    assert len(good.token_ids) == LONG.max_tokens
    assert pair.generation.stats()[0]["running"] == 0
    assert pair.generation.num_engines_alive == 2


def test_a_cancelled_request_is_aborted_in_the_engine(pair: Pair) -> None:
    async def running() -> float:
        return (await asyncio.to_thread(pair.generation.stats))[0]["running"]

    async def cancel() -> None:
        tasks = [pair.start(LONG, engine=0) for _ in range(2)]
        await asyncio.sleep(0.1)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        await asyncio.sleep(0.1)
        assert await running() == 1
        tasks[1].cancel()
        await asyncio.wait(tasks)
        for _ in range(100):
            if await running() == 0:
                return
            await asyncio.sleep(0.05)
        pytest.fail("the requests nobody wants still run")

    asyncio.run(cancel())


def test_a_prompt_without_room_for_an_answer_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="prompt has 512 tokens"):
        asyncio.run(pair.generation.generate((5,) * 512, SHORT, affinity=0))


def test_an_engine_that_is_started_again_has_no_weights_until_the_next_push(pair: Pair) -> None:
    expected, later = (pair.generate(LONG, engine=engine, sample=7) for engine in (0, 2))
    dead = pair.generation.infos[0]

    async def killed() -> Completion:
        task = pair.start(LONG, engine=0, sample=7)
        await asyncio.sleep(0.1)
        os.kill(dead.core_pids[0], signal.SIGKILL)
        began = time.monotonic()
        completion = await task
        assert time.monotonic() - began < patiently(30)
        return completion

    totals = pair.generation.stats()[0]
    assert asyncio.run(killed()).token_ids == expected.token_ids, "the other engine must sample the same"
    assert pair.generation.num_engines_alive == 1
    info = pair.wait_for_start(0, dead)
    assert pair.generation.num_engines_alive == 1
    prompt = Tokens.of(to_bytes(PROMPT))
    request = Request(
        id=-1, token_ids=bytes(prompt.ids), num_prompt_tokens=len(PROMPT), sampling=SHORT, affinity=0, sample=(0,)
    )
    with pytest.raises(
        EngineError, match=rf"engine 0 \(.*{info.pid}.*\) has no weights: nothing has been pushed to it"
    ):
        # also when somebody asks it directly
        ray.get(pair.generation._engines[0].actor.sample.remote("test", request, prompt))
    pair.push(0)
    assert pair.generation.num_engines_alive == 2
    wait_until_gone(dead.pid, seconds=10)
    assert info.core_pids != dead.core_pids
    assert pair.generate(LONG, engine=2, sample=7).token_ids == later.token_ids
    after = pair.generation.stats()[0]
    assert after["generated_tokens"] > totals["generated_tokens"], "a new actor's totals start where the old one's end"


def test_an_engine_that_dies_later_opens_with_the_next_push(pair: Pair) -> None:
    pair.push(1)
    dead = pair.generation.infos[1]
    [raylet] = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]

    async def kill_actor() -> Completion:
        task = pair.start(LONG, engine=1)
        await asyncio.sleep(0.1)
        raylet.suspend()  # it would clean up; a node that loses its raylet too must not depend on that
        try:
            os.kill(dead.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until_gone, dead.core_pids[0], seconds=10)
        finally:
            raylet.resume()
        return await task

    assert len(asyncio.run(kill_actor()).token_ids) == LONG.max_tokens
    pair.push(2)  # with one engine
    assert pair.generation.num_engines_alive == 1
    pair.wait_for_start(1, dead)
    assert pair.generation.num_engines_alive == 1, "its weights are those of the start, not of version 2"
    assert {span.version for span in pair.generate(SHORT, engine=1).versions} == {2}
    pair.push(3)
    assert pair.generation.num_engines_alive == 2
    before = pair.generation.stats()[1]["requests"]
    assert {span.version for span in pair.generate(SHORT, engine=3).versions} == {3}
    assert pair.generation.stats()[1]["requests"] == before + 1


def test_an_engine_that_dies_in_a_push_is_left_out(pair: Pair) -> None:
    dead = pair.generation.infos[0]
    os.kill(dead.core_pids[0], signal.SIGSTOP)  # its part of the push waits until it is killed

    async def push_and_kill() -> None:
        push = asyncio.create_task(asyncio.to_thread(pair.push, 4))
        await asyncio.sleep(0.5)
        assert not push.done()
        os.kill(dead.core_pids[0], signal.SIGKILL)
        await push

    asyncio.run(push_and_kill())
    assert pair.generation.num_engines_alive == 1
    assert {span.version for span in pair.generate(SHORT, engine=0).versions} == {4}
    pair.wait_for_start(0, dead)
    pair.push(5)
    assert pair.generation.num_engines_alive == 2


def test_a_silent_actor_is_replaced(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "SILENCE_SECONDS", 8.0)  # a live one speaks every 2 s
    dead = pair.generation.infos[1]

    async def stop() -> Completion:
        os.kill(dead.pid, signal.SIGSTOP)
        return await asyncio.wait_for(pair.start(SHORT, engine=3), patiently(60))

    assert len(asyncio.run(stop()).token_ids) == 4
    wait_until_gone(dead.pid, seconds=10)
    pair.wait_for_start(1, dead)
    pair.push(6)
    assert pair.generation.num_engines_alive == 2


def test_without_any_engine_requests_and_pushes_fail_and_name_the_engines(pair: Pair) -> None:
    infos = pair.generation.infos

    async def kill_both() -> str:
        task = pair.start(LONG, engine=0)
        await asyncio.sleep(0.1)
        for info in infos:
            os.kill(info.core_pids[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="no generation engine is left") as raised:
            await task
        return str(raised.value)

    message = asyncio.run(kill_both())
    assert all(is_named(info, message) for info in infos)
    with pytest.raises(EngineError, match="no generation engine is left") as raised:
        pair.push(7)
    assert all(is_named(info, str(raised.value)) for info in infos)
    assert [engine["running"] for engine in pair.generation.stats()] == [0, 0]  # and does not raise
