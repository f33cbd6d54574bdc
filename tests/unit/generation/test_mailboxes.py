"""An answer comes with the oldest call that has brought requests; the answers that are left are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from recipes.errors import EngineError
from recipes.generation.serving.mailboxes import Mailboxes
from recipes.generation.serving.requests import Answers, Request, Sample
from recipes.generation.serving.sessions import Tokens
from recipes.types import Sampling

SAMPLE = Sample(token_ids=b"", logprobs=b"", versions=(), finish_reason="stop")
SECONDS = 60.0  # far more than any wait here takes


class Engine:
    """Answers a request when the test says so."""

    def __init__(self) -> None:
        self.is_dead = False
        self.done: dict[int, asyncio.Future[Sample]] = {}  # by request id

    def __str__(self) -> str:
        return "engine 3"

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        return await self.done.setdefault(request.id, asyncio.get_running_loop().create_future())


class Case:
    """One engine and the calls of its clients."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.boxes = Mailboxes(self.engine)

    def ask(self, numbers: Sequence[int], *, client: str = "w") -> asyncio.Task[Answers]:
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
        requests = [
            Request(id=n, token_ids=b"", num_prompt_tokens=2, sampling=sampling, affinity=0, sample=()) for n in numbers
        ]
        return asyncio.create_task(self.boxes.ask(client, requests, SECONDS))

    def fetch(self, *, client: str = "w") -> asyncio.Task[Answers]:
        return asyncio.create_task(self.boxes.fetch(client, SECONDS))


async def tick() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def ids(told: Answers) -> list[int]:
    return [answer.id for answer in told.answers]


async def test_an_answer_comes_with_the_oldest_call() -> None:
    case = Case()
    first, second = case.ask([1]), case.ask([2])
    fetch = case.fetch()
    await tick()
    case.engine.done[2].set_result(SAMPLE)
    await tick()
    assert ids(await first) == [2] and not second.done()
    case.engine.done[1].set_result(SAMPLE)
    assert ids(await second) == [1]
    await tick()
    assert not fetch.done(), "nothing is left to fetch"
    fetch.cancel()


async def test_what_is_left_of_many_requests_in_one_call_is_fetched() -> None:
    case = Case()
    call = case.ask([1, 2, 3])
    await tick()
    case.engine.done[3].set_result(SAMPLE)
    assert ids(await call) == [3]
    for number in (1, 2):
        case.engine.done[number].set_result(SAMPLE)
    await tick()
    assert ids(await case.fetch()) == [1, 2]


async def test_a_call_whose_request_is_aborted_returns_without_an_answer() -> None:
    case = Case()
    call, other = case.ask([1]), case.ask([7], client="v")
    await tick()
    case.boxes.abort("w", 1)
    told = await call
    assert told.answers == () and told.work_of_others == 10
    case.boxes.forget("v")
    assert (await other).answers == ()


async def test_a_dead_engine_ends_every_call_and_fails_the_fetches_of_all_clients() -> None:
    case = Case()
    fetches = [case.fetch(), case.fetch(client="idle")]
    call = case.ask([1, 2])
    await tick()
    case.engine.is_dead = True
    case.engine.done[1].set_exception(OSError("EngineCore died"))
    case.engine.done[2].set_exception(OSError("EngineCore died"))
    assert (await call).answers == ()
    for fetch in fetches:
        with pytest.raises(EngineError, match="engine 3 is dead"):
            await fetch
