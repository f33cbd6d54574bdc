"""Requests are gathered per tick, answered one by one, and survive the engine that sampled them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from recipes.errors import EngineError, RequestError
from recipes.generation.clients.router import MAX_ENGINES_LOST, Router
from recipes.generation.serving.requests import Answer, Answers, Request, Sample, request_seed, to_bytes
from recipes.types import Completion, Sampling

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)


class Engines:
    """Two engines that answer when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[Request]]] = []
        self.aborted: list[tuple[int, int]] = []
        self.router = Router(2, send=self._send, abort=lambda *call: self.aborted.append(call))

    def _send(self, engine: int, requests: Sequence[Request]) -> None:
        self.calls.append((engine, list(requests)))

    def ask(self, *, affinity: int = 0, sample: int = 0) -> asyncio.Task[Completion]:
        work = self.router.generate((1, 2), SAMPLING, affinity=affinity, sample=(sample,))
        return asyncio.get_running_loop().create_task(work)

    def answer(self, engine: int, request: Request, *tokens: int) -> None:
        ids = np.asarray(tokens, dtype=np.int32)
        sample = Sample(
            token_ids=ids.tobytes(),
            logprobs=np.full(len(ids), -0.5, dtype=np.float32).tobytes(),
            versions=((3, 0, len(ids)),),
            finish_reason="stop",
        )
        self.router.deliver(engine, Answers(answers=(Answer(id=request.id, sample=sample),)))


async def tick() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_one_call_carries_a_tick_and_each_answer_comes_by_itself() -> None:
    engines = Engines()
    tasks = [engines.ask(affinity=affinity, sample=sample) for affinity in (0, 1, 2) for sample in (0, 1)]
    await tick()
    [(first, of_first), (second, of_second)] = engines.calls
    assert {first: len(of_first), second: len(of_second)} == {0: 4, 1: 2}
    assert len({request.id for _, requests in engines.calls for request in requests}) == 6
    engines.answer(0, of_first[1], 7, 8)
    await tick()
    assert [task.done() for task in tasks] == [False, True, False, False, False, False]
    completion = tasks[1].result()
    assert completion.token_ids == (7, 8) and completion.logprobs == (-0.5, -0.5)
    assert completion.versions[0].version == 3 and completion.versions[0].end == 2
    for task in tasks:
        task.cancel()


async def test_a_failed_request_fails_alone_and_says_why() -> None:
    engines = Engines()
    late, broken, good = (engines.ask(sample=sample) for sample in range(3))
    await tick()
    [(_, requests)] = engines.calls
    answers = Answer(id=requests[0].id, failure="slow"), Answer(id=requests[1].id, failure="odd")
    engines.router.deliver(0, Answers(answers=answers))
    engines.answer(0, requests[2], 5)
    outcomes = await asyncio.gather(late, broken, good, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes[:2] if isinstance(outcome, RequestError)] == ["slow", "odd"]
    assert isinstance(outcomes[2], Completion)


async def test_a_cancelled_request_is_aborted_unless_it_was_never_sent() -> None:
    engines = Engines()
    sent = engines.ask()
    await tick()
    sent.cancel()
    unsent = engines.ask()
    await asyncio.sleep(0)  # it has asked; the tick has not ended
    unsent.cancel()
    await asyncio.gather(sent, unsent, return_exceptions=True)
    await tick()
    [(_, [request])] = engines.calls
    assert engines.aborted == [(0, request.id)]


async def test_the_requests_of_a_dead_engine_are_sampled_on_the_other() -> None:
    engines = Engines()
    moved, answered = engines.ask(sample=0), engines.ask(sample=1)
    await tick()
    [(_, requests)] = engines.calls
    engines.answer(0, requests[1], 1)
    assert engines.router.close(0, "engine 0 is dead") == 1
    assert engines.calls[1:] == [(1, [requests[0]])]
    later = engines.ask(sample=2)  # of a prompt whose engine is closed
    await tick()
    assert engines.calls[2][0] == 1
    engines.answer(0, requests[0], 9)  # of the dead engine: too late
    engines.answer(1, requests[0], 2)
    assert (await moved).token_ids == (2,) and (await answered).token_ids == (1,)
    later.cancel()
    engines.router.open(0)
    assert engines.router.num_open() == 2
    engines.ask(sample=3).cancel()


async def test_a_request_that_kills_every_engine_fails_before_the_run_does() -> None:
    engines = Engines()
    task = engines.ask()
    for _ in range(MAX_ENGINES_LOST):
        await tick()
        engine = engines.calls[-1][0]
        engines.router.close(engine, f"engine {engine} is dead")
        engines.router.open(engine)  # started again in the meantime
    with pytest.raises(RequestError, match="died while they sampled it, the last: engine"):
        await task


async def test_requests_wait_for_a_connection_that_is_made_again_only_where_no_engine_is_left() -> None:
    engines = Engines()
    engines.router.cut(0, "its connection ended")
    moved = engines.ask(affinity=0)
    await tick()
    assert [engine for engine, _ in engines.calls] == [1], "the other engine is there"
    engines.router.close(1, "engine 1 is dead")
    gone = engines.ask(affinity=0, sample=1)
    await tick()
    assert engines.router.num_open() == 1 and len(engines.calls) == 1
    gone.cancel()
    await tick()
    engines.router.mend(0)
    [_, (engine, [request])] = engines.calls
    assert engine == 0
    engines.answer(0, request, 4)
    assert (await moved).token_ids == (4,)


async def test_mending_a_connection_does_not_open_an_engine_that_is_closed() -> None:
    engines = Engines()
    engines.router.close(0, "engine 0 has no weights")
    engines.router.close(1, "engine 1 has no weights")
    engines.router.cut(0, "its connection ended")
    engines.router.mend(0)
    with pytest.raises(EngineError, match="engine 0 has no weights"):
        await engines.ask()


async def test_without_an_engine_every_request_is_an_engine_error() -> None:
    engines = Engines()
    task = engines.ask()
    await tick()
    engines.router.close(0, "engine 0 is dead")
    engines.router.close(1, "engine 1 is silent")
    for failing in (task, engines.ask()):
        with pytest.raises(EngineError, match="no generation engine is left: engine 0 is dead; engine 1 is silent"):
            await failing


async def test_no_work_is_left_counted_whatever_becomes_of_a_request() -> None:
    """Answered, failed, cancelled before and after it was sent, moved, given up, stranded: an idle engine has none."""
    engines = Engines()
    tasks = [engines.ask(affinity=n, sample=n) for n in range(6)]
    await tick()
    requests = [request for _, asked in engines.calls for request in asked]
    assert len(requests) == 6 and all(engines.router._balance.work)
    engines.answer(0, engines.calls[0][1][0], 1)
    engines.router.deliver(1, Answers(answers=(Answer(id=engines.calls[1][1][0].id, failure="slow"),)))
    engines.router.deliver(1, Answers(answers=(Answer(id=engines.calls[1][1][0].id, failure="twice"),)))
    tasks[4].cancel()
    unsent = engines.ask(sample=9)
    await asyncio.sleep(0)
    unsent.cancel()
    for engine in (0, 1):
        for _ in range(MAX_ENGINES_LOST):  # the rest moves to and fro until it is given up
            engines.router.close(engine, "dead")
            engines.router.open(engine)
    engines.router.close(0, "dead")
    engines.router.close(1, "dead")
    outcomes = await asyncio.gather(*tasks, unsent, engines.ask(sample=10), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {
        Completion,
        RequestError,
        asyncio.CancelledError,
        EngineError,
    }
    assert engines.router._balance.work == [0, 0]


def test_answers_reach_the_thread_of_each_event_loop() -> None:
    engines = Engines()
    for _ in range(2):  # a new loop each time, the old one closed with a request open

        async def one() -> tuple[int, ...]:
            open_request = engines.ask(sample=1)
            task = engines.ask()
            await tick()
            request = engines.calls[-1][1][1]
            await asyncio.to_thread(engines.answer, 0, request, 4)
            completion = await task
            open_request.cancel()
            return completion.token_ids

        assert asyncio.run(one()) == (4,)
    assert len(engines.aborted) == 2


def test_a_sample_has_its_own_seed_that_nothing_else_changes() -> None:
    prompt = to_bytes((1, 2, 3))
    request = Request(id=1, token_ids=prompt, num_prompt_tokens=3, sampling=SAMPLING, affinity=4, sample=(5, 0))
    seed = request_seed(42, request, prompt)
    assert 0 <= seed < 2**63
    unlike = replace(request, id=2, token_ids=to_bytes((3,)), sampling=replace(SAMPLING, max_tokens=1))
    assert request_seed(42, unlike, prompt) == seed
    others = [
        request_seed(43, request, prompt),
        request_seed(42, request, to_bytes((1, 2, 4))),
        *(
            request_seed(42, replace(request, **change), prompt)
            for change in ({"affinity": 5}, {"sample": (6, 0)}, {"sample": (5, 1)})
        ),
    ]
    assert len({seed, *others}) == 6


def test_the_seed_of_a_long_prompt_depends_on_its_end_and_costs_no_more() -> None:
    request = Request(id=1, token_ids=b"", num_prompt_tokens=0, sampling=SAMPLING, affinity=4, sample=(5, 0))
    long = to_bytes(range(100_000))
    assert request_seed(42, request, long) != request_seed(42, request, long[:-4] + to_bytes((7,)))
    assert request_seed(42, request, to_bytes((7,)) + long[4:]) == request_seed(42, request, long)
