"""A client that is told which engines are open, on actors that answer when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.errors import EngineError
from recipes.generation.clients.client import FollowingClient, OpenEngines
from recipes.generation.serving.requests import Answer, Answers, Request, Sample
from recipes.types import Completion, Sampling

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)


class Method:
    """A method of an actor, called as Ray calls it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **_options: Any) -> Method:
        return self


class Actor:
    """An engine's actor; what is put on `said` is the outcome of its next `answers`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted: list[int] = []
        self.said: asyncio.Queue[Answers | Exception] = asyncio.Queue()
        self.submit, self.abort, self.answers = Method(self._submit), Method(self._abort), Method(self._answers)

    def _submit(self, client: str, requests: Sequence[Request], _seconds: float) -> None:
        assert client == "worker"
        self.requests += requests

    def _abort(self, client: str, number: int) -> None:
        assert client == "worker"
        self.aborted.append(number)

    def _answers(self, client: str, _seconds: float) -> Awaitable[Answers]:
        assert client == "worker"
        return self._next()

    async def _next(self) -> Answers:
        said = await self.said.get()
        if isinstance(said, Exception):
            raise said
        return said

    def answer(self, request: Request) -> None:
        ids, logprobs = np.asarray([7], np.int32).tobytes(), np.asarray([-1.0], np.float32).tobytes()
        sample = Sample(token_ids=ids, logprobs=logprobs, versions=((0, 0, 1),), finish_reason="stop")
        self.said.put_nowait(Answers(answers=(Answer(id=request.id, sample=sample),)))


async def tick() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.fixture
async def case() -> AsyncIterator[SimpleNamespace]:
    client = FollowingClient("worker", 2, max_model_len=16, deadline_seconds=5.0)
    first, second = Actor(), Actor()
    client.follow(OpenEngines(number=1, actors={(0, 1): first, (1, 1): second}))

    def ask(affinity: int) -> asyncio.Task[Completion]:
        return asyncio.get_running_loop().create_task(client.generate((1,), SAMPLING, affinity=affinity, sample=(0, 0)))

    yield SimpleNamespace(client=client, first=first, second=second, ask=ask)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_nothing_is_sampled_before_an_engine_is_known() -> None:
    client = FollowingClient("worker", 1, max_model_len=16, deadline_seconds=5.0)
    with pytest.raises(EngineError, match="generation engine 0 is not known yet"):
        await client.generate((1,), SAMPLING, affinity=0)


async def test_answers_reach_who_asked(case: SimpleNamespace) -> None:
    asked = case.ask(0), case.ask(1)
    await tick()
    case.first.answer(case.first.requests[0])
    case.second.answer(case.second.requests[0])
    assert [(await task).token_ids for task in asked] == [(7,), (7,)]


async def test_the_requests_of_an_engine_that_fails_go_to_the_other(case: SimpleNamespace) -> None:
    task = case.ask(0)
    await tick()
    case.first.said.put_nowait(EngineError("generation engine 0 (node a) is dead"))
    await tick()
    assert [request.affinity for request in case.second.requests] == [0]
    case.second.answer(case.second.requests[0])
    assert (await task).token_ids == (7,)


async def test_an_engine_that_the_driver_closes_gets_nothing_until_it_is_started_again(case: SimpleNamespace) -> None:
    case.client.follow(OpenEngines(number=2, actors={(1, 1): case.second}, closed={0: "silent"}))
    again = Actor()
    moved = case.ask(0)
    await tick()
    assert (case.first.requests, len(case.second.requests)) == ([], 1)
    case.client.follow(OpenEngines(number=3, actors={(0, 2): again, (1, 1): case.second}))
    case.client.follow(OpenEngines(number=2, actors={}, closed={0: "old", 1: "old"}))
    for affinity in (2, 3):
        case.ask(affinity)
    await tick()
    assert again.requests, "what is older than what was said last must change nothing"
    moved.cancel()
    await tick()
    assert case.second.aborted == [case.second.requests[0].id]


async def test_no_engine_is_left_when_both_are_closed(case: SimpleNamespace) -> None:
    task = case.ask(0)
    await tick()
    case.client.follow(OpenEngines(number=2, closed={0: "silent", 1: "its actor process died"}))
    with pytest.raises(EngineError, match=r"no generation engine is left: .*died"):
        await task
