"""A rollout's turns send only their new tokens; whatever is lost on the way is sent again as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from recipes.errors import RequestError
from recipes.generation.clients.router import EngineSession, Router
from recipes.generation.serving import outstanding as module
from recipes.generation.serving.outstanding import KeptSessions, OutstandingRequests, Tokens
from recipes.generation.serving.requests import ClientMessage, InSession, Request, Sample, to_bytes
from recipes.token_ids import TokenIds
from recipes.types import Sampling

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)


class Engine:
    """Answers every prompt with its length, twice, and keeps what it was asked."""

    is_dead = False

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.fails = False
        self.open = asyncio.Event()
        self.open.set()

    async def sample(self, name: str, request: Request, prompt: Tokens) -> Sample:
        await self.open.wait()
        if self.fails:
            raise ValueError("odd")
        self.prompts.append(list(prompt.values))
        assert bytes(prompt.ids) == to_bytes(prompt.values) and len(prompt.values) == request.num_prompt_tokens
        ids = to_bytes([len(prompt.values)] * 2)
        return Sample(
            token_ids=ids, logprobs=np.zeros(2, np.float32).tobytes(), versions=((0, 0, 2),), finish_reason="stop"
        )


class Case:
    """One client on two engines."""

    def __init__(self) -> None:
        self.engines = [Engine(), Engine()]
        self.outstanding = [OutstandingRequests(engine) for engine in self.engines]
        self.sent: list[tuple[int, int, int]] = []  # engine, tokens on the way, tokens that the engine keeps
        self.router = Router(2, send=self._send, abort=self._abort)
        self.opened = [
            asked.open("w", partial(self.router.deliver, engine)) for engine, asked in enumerate(self.outstanding)
        ]

    def _send(self, engine: int, requests: Sequence[Request]) -> None:
        for one in requests:
            self.sent.append((engine, len(one.token_ids) // 4, one.session.num_kept if one.session else 0))
        message = ClientMessage(requests=tuple(requests), deadline_seconds=5.0)
        self.outstanding[engine].take(self.opened[engine], message)

    def _abort(self, engine: int, number: int) -> None:
        self.outstanding[engine].take(self.opened[engine], ClientMessage(aborted=(number,)))

    async def ask(self, prompt: tuple[int, ...], session: EngineSession | None, *, call: int = 0) -> tuple[int, ...]:
        """Return the prompt with its answer."""
        done = await self.router.generate(prompt, SAMPLING, affinity=0, sample=(0, call), session=session)
        assert done.token_ids == (len(prompt),) * 2
        return prompt + done.token_ids


@pytest.fixture
async def case() -> Case:
    return Case()


async def grow(case: Case, session: EngineSession, turns: int) -> tuple[int, ...]:
    """Take turns, each with ten new tokens before it."""
    said: tuple[int, ...] = ()
    for turn in range(turns):
        said = await case.ask(said + tuple(range(1000 * turn, 1000 * turn + 10)), session, call=turn)
    return said


async def test_from_the_third_call_on_only_new_tokens_are_sent(case: Case) -> None:
    await grow(case, EngineSession(), 5)
    assert case.sent == [(0, 10, 0), (0, 22, 0), (0, 10, 24), (0, 10, 36), (0, 10, 48)]
    whole = case.engines[0].prompts[-1]
    assert len(whole) == 58 and whole[48:] == list(range(4000, 4010)) and whole[:10] == list(range(10))
    assert case.outstanding[0].sessions.num_tokens == 60


async def test_a_rollout_of_one_call_leaves_nothing_on_the_engine(case: Case) -> None:
    session = EngineSession()
    await case.ask((1, 2, 3), session)
    assert len(case.outstanding[0].sessions) == 0 and session.engine is None


async def test_a_prompt_that_leaves_the_conversation_keeps_what_they_share(case: Case) -> None:
    session = EngineSession()
    said = await grow(case, session, 3)
    fork = (*said[:20], 7, 7, 7)
    await case.ask(fork, session)
    assert case.sent[-1] == (0, 3, 20) and case.engines[0].prompts[-1] == list(fork)
    await case.ask((9, 9), session)  # shares nothing
    assert case.sent[-1] == (0, 2, 0) and case.engines[0].prompts[-1] == [9, 9]
    await case.ask((9,), session)  # a beginning of what was said
    assert case.sent[-1] == (0, 0, 1) and case.engines[0].prompts[-1] == [9]


async def test_equal_tokens_of_other_objects_are_found_too(case: Case) -> None:
    session = EngineSession()
    said = await grow(case, session, 3)
    await case.ask((*np.array(said).tolist(), 5), session)
    assert case.sent[-1] == (0, 1, len(said))


async def test_a_call_beside_another_brings_its_whole_prompt(case: Case) -> None:
    session = EngineSession()
    said = await grow(case, session, 3)
    await asyncio.gather(case.ask((*said, 1), session), case.ask((*said, 2), session), case.ask((*said, 3), session))
    assert sorted(case.sent[-3:]) == [(0, 1, 36), (0, 37, 0), (0, 37, 0)]
    assert sorted(prompt[-1] for prompt in case.engines[0].prompts[-3:]) == [1, 2, 3]
    await case.ask((*said, 1, 37, 37, 8), session)
    assert case.sent[-1] == (0, 1, 39), "the session goes on behind the call that had it"


async def test_a_lost_session_is_no_error(case: Case) -> None:
    session = EngineSession()
    said = await grow(case, session, 3)
    case.outstanding[0].sessions.forget("w")
    said = await case.ask((*said, 4), session)
    assert case.sent[-2:] == [(0, 1, 36), (0, 37, 0)] and len(case.engines[0].prompts) == 4
    await case.ask((*said, 4), session)
    assert case.sent[-1] == (0, 1, 39), "the next turn is short again"


async def test_another_engine_gets_all_tokens(case: Case) -> None:
    session = EngineSession()
    said = await grow(case, session, 3)
    case.engines[0].open.clear()
    task = asyncio.create_task(case.ask((*said, 4), session))
    await asyncio.sleep(0.02)
    case.router.close(0, "dead")
    said = await task
    assert case.sent[-2:] == [(0, 1, 36), (1, 37, 0)]
    await case.ask((*said, 4), session)
    assert case.sent[-1] == (1, 1, 39)


async def test_a_call_that_fails_or_is_cancelled_costs_one_whole_prompt(case: Case) -> None:
    session = EngineSession()
    said = await grow(case, session, 3)
    case.engines[0].fails = True
    with pytest.raises(RequestError, match="odd"):
        await case.ask((*said, 4), session)
    case.engines[0].fails = False
    case.engines[0].open.clear()
    task = asyncio.create_task(case.ask((*said, 5), session))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    case.engines[0].open.set()
    for last in (6, 8):
        said = await case.ask((*said, last), session)
    assert case.sent[-2:] == [(0, 37, 0), (0, 1, 39)] and case.engines[0].prompts[-1] == list(said[:-2])


def placed(number: int) -> InSession:
    return InSession(number=number)


def test_what_an_engine_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 4)
    monkeypatch.setattr(module, "MAX_TOKENS", 100)
    now = [0.0]
    kept = KeptSessions(clock=lambda: now[0])
    ten = Tokens.of(to_bytes(range(10)))  # nobody changes it here
    for number in range(6):
        kept.keep("a", number, placed(number), ten)
    assert len(kept) == 4 and kept.num_tokens == 40
    kept.keep("a", 9, placed(9), Tokens.of(to_bytes(range(85))))
    assert kept.num_tokens == 95 and len(kept) == 2
    kept.keep("b", 0, placed(9), ten)
    assert len(kept) == 2, "the numbers of two clients are not the same session"
    kept.forget("a")
    assert (len(kept), kept.num_tokens) == (1, 10)
    now[0] = module.IDLE_SECONDS + 1
    kept.keep("c", 0, placed(0), ten)
    assert (len(kept), kept.num_tokens) == (1, 10), "the session of b has been idle too long"
    kept.keep("c", 1, placed(1), Tokens.of(to_bytes(range(101))))
    assert (len(kept), kept.num_tokens) == (0, 0)
    kept.end("c", 5)


def test_what_is_kept_for_another_call_is_not_continued() -> None:
    kept = KeptSessions()
    kept.keep("a", 3, placed(0), Tokens.of(to_bytes(range(10))))

    def asked(after: int, num_kept: int) -> Tokens | None:
        place = InSession(number=0, after=after, num_kept=num_kept)
        request = Request(
            id=8,
            token_ids=to_bytes([1]),
            num_prompt_tokens=1,
            sampling=SAMPLING,
            affinity=0,
            sample=(0,),
            session=place,
        )
        return kept.take("a", request)

    assert asked(2, 4) is None and asked(3, 11) is None
    found = asked(3, 4)
    assert found is not None and found.values == [0, 1, 2, 3, 1]


def test_each_route_is_asked_for_once_in_a_conversation() -> None:
    session, whole = EngineSession(), TokenIds((1, 2, 3))
    assert session.routes_from(whole) == 0
    session.routed(whole.plus((4, 5)))  # the last token is computed with what follows it
    longer = TokenIds((1, 2, 3, 4, 5, 6))
    assert session.routes_from(longer) == 4
    session.routed(longer.plus((7,)))
    assert session.routes_from(longer.plus((7, 8))) == 6
    assert session.routes_from(longer.plus((8,))) == 0, "it does not continue what was answered"
    assert session.routes_from(TokenIds((1, 2, 3, 4, 5))) == 0
    aside = TokenIds((9, 9))
    session.routed(aside)
    assert session.routes_from(longer.plus((7, 8))) == 6 and session.routes_from(aside.plus((1,))) == 1
