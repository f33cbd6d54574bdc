"""A client that is told which engines are open: real connections, to engines that answer when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from recipes.cluster.ports import hold
from recipes.errors import EngineError, RequestError
from recipes.generation.clients import client as client_module
from recipes.generation.clients import router as stream_module
from recipes.generation.clients.client import EngineClient, FollowingClient, OpenEngines
from recipes.generation.clients.router import EngineStream
from recipes.generation.serving.outstanding import Listener, OutstandingRequests, Tokens
from recipes.generation.serving.requests import Answers, EngineAddress, Request, Sample, frame
from recipes.rollouts.group import PolicyClient
from recipes.types import Completion, Sampling

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
SECONDS = 30.0  # far more than any wait here takes


@dataclass(eq=False)
class Engine:
    """What one actor does with requests, and the connections of its clients."""

    name: str
    is_dead: bool = False
    asked: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)
    results: dict[int, asyncio.Future[Sample]] = field(default_factory=dict)  # by request id
    ended: asyncio.Queue[int] = field(default_factory=asyncio.Queue)  # ids of requests that nobody waits for

    async def start(self) -> Engine:
        self.outstanding = OutstandingRequests(self)
        self.listener = await Listener.start(self.outstanding, hold(0, host="127.0.0.1"))
        return self

    def __str__(self) -> str:
        return self.name

    @property
    def address(self) -> EngineAddress:
        return self.listener.address

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        result = self.results[request.id] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(request)
        try:
            return await result
        except asyncio.CancelledError:
            self.ended.put_nowait(request.id)
            raise

    async def next(self) -> Request:
        """Return the next request that has come."""
        return await asyncio.wait_for(self.asked.get(), SECONDS)

    def answer(self, request: Request, token: int = 7) -> None:
        ids, logprobs = np.asarray([token], np.int32).tobytes(), np.asarray([-1.0], np.float32).tobytes()
        sample = Sample(token_ids=ids, logprobs=logprobs, versions=((0, 0, 1),), finish_reason="stop")
        self.results[request.id].set_result(sample)

    def die(self) -> None:
        self.is_dead = True
        for result in self.results.values():
            if not result.done():
                result.set_exception(OSError("EngineCore died"))


class Case:
    """One client of two engines."""

    async def start(self) -> Case:
        self.first, self.second = await Engine("engine A").start(), await Engine("engine B").start()
        self.client = FollowingClient("worker", 2, max_model_len=16, deadline_seconds=SECONDS)
        self.addresses = {(0, 1): self.first.address, (1, 1): self.second.address}
        self.client.follow(OpenEngines(number=1, addresses=self.addresses))
        return self

    def ask(self, affinity: int) -> asyncio.Task[Completion]:
        work = self.client.generate((1,), SAMPLING, affinity=affinity, sample=(0, 0))
        return asyncio.get_running_loop().create_task(work)


@pytest.fixture
async def case(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.01)
    made = await Case().start()
    yield made
    for engine in (made.first, made.second):
        engine.listener.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def outcome(task: asyncio.Task[Completion]) -> tuple[int, ...]:
    return (await asyncio.wait_for(task, SECONDS)).token_ids


async def test_nothing_is_sampled_before_an_engine_is_known() -> None:
    client = FollowingClient("worker", 1, max_model_len=16, deadline_seconds=5.0)
    with pytest.raises(EngineError, match="generation engine 0 is not known yet"):
        await client.generate((1,), SAMPLING, affinity=0)


async def test_answers_reach_who_asked(case: Case) -> None:
    asked = case.ask(0), case.ask(1)
    case.first.answer(await case.first.next(), 3)
    case.second.answer(await case.second.next(), 4)
    assert [await outcome(task) for task in asked] == [(3,), (4,)]


async def test_a_request_that_fails_says_why(case: Case) -> None:
    task = case.ask(0)
    case.first.results[(await case.first.next()).id].set_exception(ValueError("odd"))
    with pytest.raises(RequestError, match="engine A: ValueError: odd"):
        await outcome(task)


async def test_an_answer_arrives_when_a_push_opens_the_engine_meanwhile(case: Case) -> None:
    """Each push opens the engines that are open already, and the driver may tell the same once more."""
    task = case.ask(0)
    request = await case.first.next()
    case.client.open(0)
    case.client.follow(OpenEngines(number=2, addresses={key: replace(one) for key, one in case.addresses.items()}))
    case.first.answer(request)
    assert await outcome(task) == (7,)
    assert case.second.asked.empty(), "it must not be sampled twice"


async def test_the_requests_of_an_engine_that_dies_go_to_the_other(case: Case) -> None:
    task = case.ask(0)
    await case.first.next()
    case.first.die()
    request = await case.second.next()
    assert request.affinity == 0
    case.second.answer(request)
    assert await outcome(task) == (7,)
    assert not case.client.router.closed(), "the driver decides that"


async def test_a_dead_engine_says_so_to_clients_that_ask_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    task = case.ask(0)
    case.first.answer(await case.first.next())
    await outcome(task)
    case.first.die()
    case.first.outstanding.died.set()  # as the beat finds it, sooner
    async with asyncio.timeout(SECONDS):
        while 0 not in case.client.router._cut:
            await asyncio.sleep(0.01)


async def test_a_broken_connection_costs_no_request_and_is_made_again(case: Case) -> None:
    task = case.ask(0)
    lost = await case.first.next()
    break_connection(case.client)
    request = await case.second.next()
    assert await asyncio.wait_for(case.first.ended.get(), SECONDS) == lost.id, "nobody waits for it there"
    case.second.answer(request)
    assert await outcome(task) == (7,)
    async with asyncio.timeout(SECONDS):
        while case.client.router._cut:
            await asyncio.sleep(0.01)
    again = case.ask(4)
    case.first.answer(await case.first.next(), 5)
    assert await outcome(again) == (5,)


def break_connection(client: EngineClient, engine: int = 0) -> None:
    stream = client._streams[engine]
    assert stream._writer is not None
    stream._writer.transport.abort()


def only_first(case: Case) -> None:
    """Close the second engine, as the driver does."""
    case.client.follow(OpenEngines(number=2, addresses={(0, 1): case.first.address}, closed={1: "silent"}))


async def test_a_broken_connection_to_the_only_engine_costs_no_request(case: Case) -> None:
    only_first(case)
    asked = case.ask(0)
    lost = await case.first.next()
    break_connection(case.client)
    assert await asyncio.wait_for(case.first.ended.get(), SECONDS) == lost.id
    late = case.ask(1)  # while the connection is made again, or after that
    for _ in range(2):
        case.first.answer(await case.first.next())
    assert [await outcome(task) for task in (asked, late)] == [(7,), (7,)]


async def test_requests_do_not_wait_for_an_engine_that_the_driver_closes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", SECONDS)
    only_first(case)
    task = case.ask(0)
    await case.first.next()
    break_connection(case.client)
    async with asyncio.timeout(SECONDS):
        while not case.client.router._held:
            await asyncio.sleep(0.01)
    case.client.follow(OpenEngines(number=3, closed={0: "its actor process died", 1: "silent"}))
    with pytest.raises(EngineError, match="no generation engine is left: its actor process died; silent"):
        await outcome(task)


async def test_an_engine_that_cannot_be_reached_is_named_by_its_address(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.1)
    only_first(case)
    await outcome_of_one(case)
    case.first.listener.close()
    break_connection(case.client)
    where = f"{case.first.address.host}, port {case.first.address.port}, cannot be reached .*port_range_low"
    with pytest.raises(EngineError, match=where):
        await outcome(case.ask(0))


async def outcome_of_one(case: Case) -> None:
    task = case.ask(0)
    case.first.answer(await case.first.next())
    await outcome(task)


def driving(case: Case) -> tuple[EngineClient, asyncio.Task[None]]:
    """Return the driver's client of the first engine, and the task that hands over its answers."""
    driver = EngineClient("driver", 1, max_model_len=16, deadline_seconds=SECONDS)
    driver.attach(0, case.first.address, asyncio.get_running_loop())
    return driver, asyncio.create_task(driver.pass_on_again(0))


async def test_the_driver_makes_a_broken_connection_again_and_reports_an_engine_that_is_gone(case: Case) -> None:
    driver, passing = driving(case)
    task = asyncio.create_task(driver.generate((1,), SAMPLING, affinity=0))
    await case.first.next()
    break_connection(driver)
    case.first.answer(await case.first.next())
    assert await outcome(task) == (7,)
    assert not passing.done() and not driver.router.closed()
    case.first.listener.close()
    break_connection(driver)
    with pytest.raises((OSError, EOFError)):
        await asyncio.wait_for(passing, SECONDS)


async def test_an_engine_that_says_that_it_is_dead_is_not_asked_again(case: Case) -> None:
    driver, passing = driving(case)
    asking = asyncio.create_task(driver.generate((1,), SAMPLING, affinity=0))
    await case.first.next()
    case.first.die()
    with pytest.raises(EngineError, match="engine A is dead"):
        await asyncio.wait_for(passing, SECONDS)
    asking.cancel()


async def test_an_engine_that_the_driver_closes_gets_nothing_until_it_is_started_again(case: Case) -> None:
    case.client.follow(OpenEngines(number=2, addresses={(1, 1): case.second.address}, closed={0: "silent"}))
    again = await Engine("engine A, again").start()
    moved = case.ask(0)
    request = await case.second.next()
    assert case.first.asked.empty()
    case.client.follow(OpenEngines(number=3, addresses={(0, 2): again.address, (1, 1): case.second.address}))
    case.client.follow(OpenEngines(number=2, closed={0: "old", 1: "old"}))
    for affinity in (2, 3):
        case.ask(affinity)
    await again.next()  # what is older than what was said last changes nothing
    moved.cancel()
    assert await asyncio.wait_for(case.second.ended.get(), SECONDS) == request.id
    again.listener.close()


async def test_no_engine_is_left_when_both_are_closed(case: Case) -> None:
    task = case.ask(0)
    await case.first.next()
    case.client.follow(OpenEngines(number=2, closed={0: "silent", 1: "its actor process died"}))
    with pytest.raises(EngineError, match=r"no generation engine is left: .*died"):
        await outcome(task)


async def test_who_has_not_got_the_key_is_turned_away(case: Case) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(EngineError, match="cannot be reached"):
        await EngineStream("worker", replace(case.first.address, key=b"guessed"), loop).connect()
    for sent in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 500):
        reader, writer = await asyncio.open_connection(case.first.address.host, case.first.address.port)
        writer.write(sent)
        with suppress(ConnectionResetError):  # some of what was sent was never read
            assert len(await asyncio.wait_for(reader.read(), SECONDS)) <= 32, "it gets nothing but the question"
        writer.close()
    task = case.ask(0)
    case.first.answer(await case.first.next())
    assert await outcome(task) == (7,), "the others must not notice"


async def test_a_program_in_the_place_of_an_engine_is_not_believed(case: Case) -> None:
    async def lie(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(64) + frame(Answers()))

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    address = replace(case.first.address, port=server.sockets[0].getsockname()[1])
    with pytest.raises(EngineError, match="does not have the key"):
        await EngineStream("worker", address, asyncio.get_running_loop()).connect()
    server.close()


async def test_a_silent_engine_counts_as_dead(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = EngineStream("other", case.first.address, asyncio.get_running_loop())
    monkeypatch.setattr(stream_module, "SILENCE_SECONDS", 0.2)  # it speaks every 2 s
    await stream.connect()
    with pytest.raises(TimeoutError):
        for _ in range(2):  # it says its load at once
            await stream.answers()
    stream.close()


async def test_what_a_row_says_reaches_the_engine_as_a_number(case: Case) -> None:
    """JSON has `true` where a number is meant; what an engine cannot read would end the connection for all."""
    model = PolicyClient(case.client, SAMPLING, max_model_len=16, affinity=0, rollout=0)
    task = asyncio.create_task(model.generate((1, 2), max_tokens=True))
    request = await case.first.next()
    assert request.sampling.max_tokens == 1
    case.first.answer(request)
    assert await outcome(task) == (7,)


async def test_a_connection_is_tried_again_whatever_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else would: the task that does it is nobody's to wait for."""
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.0)
    client = FollowingClient("worker", 1, max_model_len=16, deadline_seconds=SECONDS)
    tries: list[int] = []

    async def reconnect(engine: int) -> None:
        tries.append(engine)
        if len(tries) == 1:
            raise UnicodeError("a name that cannot be one")

    monkeypatch.setattr(client, "reconnect", reconnect)
    await asyncio.wait_for(client._connect_again(0), SECONDS)
    assert tries == [0, 0]
