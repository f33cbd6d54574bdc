"""Which engine samples a request, and what becomes of the requests of an engine that dies. Imports no Ray.

Requests that are made in one tick of an event loop travel to their engine as one call. Each is answered by itself, as
soon as it is done. `balance.py` chooses the engine of each.

When an engine dies, its requests are sampled again on the others. A request that has lost `MAX_ENGINES_LOST` engines
fails, since it may be what kills them. While all engines are closed, every request raises `EngineError`.

An engine whose connection is cut is not closed: where no other is left, requests wait until it is mended or closed.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from recipes.errors import EngineError, RequestError
from recipes.generation.clients.balance import Balance
from recipes.generation.clients.session import EngineSession, SentPrompt
from recipes.generation.serving.requests import Answer, Answers, Request, to_completion
from recipes.token_ids import TokenIds
from recipes.types import Completion, Sampling

MAX_ENGINES_LOST = 3

Send = Callable[[int, Sequence[Request]], None]
Abort = Callable[[int, int], None]


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    """A request whose completion a coroutine of `loop` waits for."""

    request: Request  # without tokens and session: these depend on the engine
    prompt: SentPrompt
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    engine: int | None = None  # that samples it now
    num_engines_lost: int = 0
    is_session_lost: bool = False  # the engine has not got the tokens of the session

    def to_send(self, engine: int) -> Request:
        """Return the request for an engine: of a session that it has, only the new tokens."""
        token_ids, session = self.prompt.place(engine, is_lost=self.is_session_lost)
        return replace(self.request, token_ids=token_ids, session=session)


class Router:
    """Routes requests to engines by number. All methods may be called from any thread; none blocks."""

    def __init__(self, num_engines: int, *, send: Send, abort: Abort) -> None:
        self._send, self._abort = send, abort
        self._lock = threading.Lock()
        self._closed: dict[int, str] = {}  # why an engine takes no requests
        self._cut: set[int] = set()  # engines that are open, and whose connection is being made again
        self._held: list[_Waiter] = []  # that wait for one of these
        self._waiting: list[dict[int, _Waiter]] = [{} for _ in range(num_engines)]  # per engine, by request id
        self._balance = Balance(num_engines)  # counts what is in `_waiting`
        self._unsent: dict[asyncio.AbstractEventLoop, list[_Waiter]] = {}
        self._ids = itertools.count()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        affinity: int,
        sample: tuple[int, ...],
        session: EngineSession | None = None,
    ) -> Completion:
        """Return one completion; raises `RequestError` when this request fails, `EngineError` without an engine.

        Cancelling aborts the request in its engine.
        """
        token_ids = TokenIds.of(prompt_token_ids)
        prompt = session.begin(token_ids) if session else SentPrompt(token_ids=token_ids)
        request = Request(
            id=next(self._ids),
            token_ids=b"",
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            affinity=affinity,
            sample=sample,
        )
        loop = asyncio.get_running_loop()
        waiter = _Waiter(request=request, prompt=prompt, loop=loop, future=loop.create_future())
        if loop not in self._unsent:
            self._unsent[loop] = []
            loop.call_soon(self._send_gathered, loop)
        self._unsent[loop].append(waiter)
        completion = None
        try:
            completion = await waiter.future
            return completion
        finally:
            if prompt.session is not None:
                if completion is None or waiter.engine is None:
                    prompt.session.failed(token_ids)
                else:
                    prompt.session.answered(token_ids, completion, engine=waiter.engine, request_id=request.id)
            self._forget(waiter)

    def deliver(self, engine: int, told: Answers) -> None:
        """Hand each answer to the coroutine that waits for it; answers that nobody waits for are dropped.

        A request whose session is lost is sent again, with its whole prompt.
        """
        with self._lock:
            self._balance.work_of_others[engine] = told.work_of_others
            taken = [(self._take(engine, answer.id), answer) for answer in told.answers]
        waiters = [(waiter, answer) for waiter, answer in taken if waiter is not None]
        _settle([(waiter, answer) for waiter, answer in waiters if not answer.is_session_lost])
        again = [waiter for waiter, answer in waiters if answer.is_session_lost]
        for waiter in again:
            waiter.is_session_lost = True
        self._dispatch(again)

    def close(self, engine: int, reason: str) -> int:
        """Send no more requests to an engine, and its present ones elsewhere; returns how many those are."""
        with self._lock:
            self._closed[engine] = reason
            self._cut.discard(engine)
        return self._move(engine, reason)

    def cut(self, engine: int, reason: str) -> int:
        """Send requests elsewhere until `mend`, the present ones as well; returns how many those are."""
        with self._lock:
            self._cut.add(engine)
        return self._move(engine, reason)

    def mend(self, engine: int) -> None:
        """Send requests through the new connection to an engine, if it is open."""
        with self._lock:
            self._cut.discard(engine)
        self._dispatch([])

    def _move(self, engine: int, reason: str) -> int:
        """Take all requests off an engine and send them, and those that are held, where they can be sampled."""
        with self._lock:
            self._balance.work_of_others[engine] = 0
            taken = [self._take(engine, number) for number in list(self._waiting[engine])]
            waiters = [waiter for waiter in taken if waiter is not None]
        again = []
        for waiter in waiters:
            waiter.num_engines_lost += 1
            if waiter.num_engines_lost < MAX_ENGINES_LOST:
                again.append(waiter)
        given_up = RequestError(
            f"{MAX_ENGINES_LOST} generation engines, or the connections to them, died while they sampled it, "
            f"the last: {reason}"
        )
        _settle([(waiter, given_up) for waiter in waiters if waiter.num_engines_lost >= MAX_ENGINES_LOST])
        self._dispatch(again)
        return len(waiters)

    def open(self, engine: int) -> None:
        """Send requests to an engine again."""
        with self._lock:
            self._closed.pop(engine, None)
        self._dispatch([])

    def closed(self) -> dict[int, str]:
        """Return why each engine that is closed takes no requests."""
        with self._lock:
            return dict(self._closed)

    def num_open(self) -> int:
        """Return how many engines take requests."""
        with self._lock:
            return len(self._waiting) - len(self._closed)

    def _send_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        self._dispatch(self._unsent.pop(loop))

    def _dispatch(self, waiters: Iterable[_Waiter]) -> None:
        """Send requests, and those that are held, to engines; hold those again that have none and may get one."""
        batches: defaultdict[int, list[Request]] = defaultdict(list)
        stranded = []
        with self._lock:
            unusable = self._closed.keys() | self._cut
            waiters, self._held = [*self._held, *waiters], []
            for waiter in waiters:
                if waiter.future.done():  # cancelled before it was sent
                    continue
                waiter.engine = self._balance.place(waiter.request, unusable)
                if waiter.engine is None and self._cut - self._closed.keys():
                    self._held.append(waiter)
                elif waiter.engine is None:
                    stranded.append(waiter)
                else:
                    self._waiting[waiter.engine][waiter.request.id] = waiter
                    batches[waiter.engine].append(waiter.to_send(waiter.engine))
            reasons = "; ".join(reason for _, reason in sorted(self._closed.items()))
        for engine, requests in batches.items():
            self._send(engine, requests)
        _settle([(waiter, EngineError(f"no generation engine is left: {reasons}")) for waiter in stranded])

    def _take(self, engine: int, request_id: int) -> _Waiter | None:
        """Remove a request from its engine; None when it is not there. The lock is held."""
        waiter = self._waiting[engine].pop(request_id, None)
        if waiter is not None:
            self._balance.release(engine, waiter.request)
        return waiter

    def _forget(self, waiter: _Waiter) -> None:
        """Abort a request in its engine unless it has been answered."""
        with self._lock:
            engine = waiter.engine
            is_sampled = engine is not None and self._take(engine, waiter.request.id) is not None
        if is_sampled and engine is not None:
            self._abort(engine, waiter.request.id)


def _settle(outcomes: Iterable[tuple[_Waiter, Answer | Exception]]) -> None:
    """Give each waiter its outcome, in the thread of its event loop: one call per loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Answer | Exception]]] = defaultdict(list)
    for waiter, outcome in outcomes:
        by_loop[waiter.loop].append((waiter, outcome))
    for loop, pairs in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            loop.call_soon_threadsafe(_resolve, pairs)


def _resolve(pairs: Sequence[tuple[_Waiter, Answer | Exception]]) -> None:
    for waiter, outcome in pairs:
        if waiter.future.done():
            continue
        if isinstance(outcome, Exception):
            waiter.future.set_exception(outcome)
        elif outcome.sample is None:
            waiter.future.set_exception(RequestError(outcome.failure))
        else:
            waiter.future.set_result(to_completion(outcome.sample))
