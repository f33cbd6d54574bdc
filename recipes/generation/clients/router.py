"""Which engine samples a request, and what becomes of the requests of an engine that dies. Imports no Ray.

Requests that are made in one tick of an event loop travel to their engine as one call. Each is answered by itself, as
soon as it is done. `Router` chooses the engine of each.

When an engine dies, its requests are sampled again on the others. A request that has lost `MAX_ENGINES_LOST` engines
fails, since it may be what kills them. While all engines are closed, every request raises `EngineError`.

An engine whose connection is cut is not closed: where no other is left, requests wait until it is mended or closed.

Which engine a request goes to: the one with the least work left, but siblings and turns stay together. Pure.

The work of an engine is the number of tokens that its unanswered requests may still take: prompt and longest answer. Of
its own requests a client knows it exactly. Engines tell it that of the other clients with their answers: else each
client would fill the engines that the others have filled.

What a rollout has said to its engine, so that each turn sends only its new tokens. Imports no Ray.

The first call of a rollout goes without a session, since most rollouts have no second one. The second call brings its
whole prompt, and the engine keeps prompt and answer. Each later call names the call before it and sends only what
follows behind the tokens that both prompts share. A call beside another of its rollout brings its whole prompt.

All tokens are here, too. When the engine has lost them, or another engine takes over, the whole prompt is sent again.

A client's connection to the actor of an engine: messages there, answers back. Imports no Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from recipes.errors import EngineError, RequestError
from recipes.generation.serving.requests import (
    HANDSHAKE_SECONDS,
    Answer,
    Answers,
    ClientMessage,
    EngineAddress,
    InSession,
    Request,
    frame,
    introduce,
    read_frame,
    to_answers,
    to_completion,
)
from recipes.token_ids import TokenIds
from recipes.types import Completion, Sampling

_numbers: Iterator[int] = itertools.count()  # of the sessions of this process
_MOST_ROUTED = 8  # sequences of a rollout that its calls may continue without all routes being sent again


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPrompt:
    """The prompt of one call."""

    token_ids: TokenIds
    num_kept: int = 0  # leading tokens that the engine has from the call before
    session: EngineSession | None = None  # None: it is sent without one

    def part_for(self, engine: int, *, is_lost: bool) -> tuple[bytes, InSession | None]:
        """Return the tokens to send to an engine and their session; `is_lost` says that it has not got the rest."""
        session = self.session
        if session is None:
            return self.token_ids.to_bytes(), None
        if is_lost or engine != session.engine:
            return self.token_ids.to_bytes(), InSession(number=session.number)
        new_ids = self.token_ids.to_bytes(self.num_kept)
        return new_ids, InSession(number=session.number, after=session.after, num_kept=self.num_kept)


@dataclass(slots=True, eq=False)
class EngineSession:
    """The calls of one rollout. Use it on one event loop."""

    number: int = field(default_factory=lambda: next(_numbers))
    engine: int | None = None  # that has the tokens of the call before
    after: int | None = None  # id of the request of that call
    _seen: TokenIds = field(default_factory=TokenIds)  # prompt and answer of the call before
    _num_calls: int = 0
    _is_open: bool = False  # a call is not answered yet
    _routed: list[TokenIds] = field(default_factory=list)  # sequences whose routes are known, but for the last token

    def routes_from(self, token_ids: TokenIds) -> int:
        """Return the place in a prompt before which earlier calls have given the routes, as they have all of it."""
        known = [len(ids) for ids in self._routed if token_ids.num_shared(ids) == len(ids)]
        return max(known, default=1) - 1

    def routed(self, token_ids: TokenIds) -> None:
        """Note prompt and answer of a call whose routes have come; what they continue is not needed any more."""
        others = [ids for ids in self._routed if token_ids.num_shared(ids) < len(ids)]
        self._routed = [*others[1 - _MOST_ROUTED :], token_ids]

    def begin(self, token_ids: TokenIds) -> SentPrompt:
        """Return the prompt of the next call; `answered` or `failed` must follow if it has a session."""
        self._num_calls += 1
        if self._num_calls == 1 or self._is_open:
            return SentPrompt(token_ids=token_ids)
        self._is_open = True
        return SentPrompt(token_ids=token_ids, num_kept=token_ids.num_shared(self._seen), session=self)

    def answered(self, token_ids: TokenIds, completion: Completion, *, engine: int, request_id: int) -> None:
        """Note the answer of the open call, whose prompt was `token_ids`."""
        self._is_open = False
        self._seen = token_ids.plus(completion.token_ids)
        self.engine, self.after = engine, request_id

    def failed(self, token_ids: TokenIds) -> None:
        """Note that the open call, whose prompt was `token_ids`, has no answer: what the engine has is unknown."""
        self._is_open = False
        self._seen = token_ids
        self.engine = None


SILENCE_SECONDS = 60.0  # without a message, after which an actor counts as dead; a live one speaks every 2 s
_MAX_LOOKS = 8  # in this time, for a message


class EngineStream:
    """One connection of the client `name`, on one event loop. Only `send` may be called from other threads."""

    def __init__(self, name: str, address: EngineAddress, loop: asyncio.AbstractEventLoop) -> None:
        self._name, self._address, self._loop = name, address, loop
        self._unsent: list[bytes] = []  # messages from before the connection
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._num_looks = 0  # since the last message
        self._look_later: asyncio.TimerHandle | None = None

    async def connect(self) -> None:
        """Connect, unless that is done; what has been said so far is sent.

        Raises `EngineError` with the address when the actor cannot be reached or has an engine that is dead.
        """
        if self._writer is not None:
            return
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                self._reader, self._writer = await self._introduced()
        except (OSError, EOFError) as error:
            late = isinstance(error, TimeoutError) and f"no answer within {HANDSHAKE_SECONDS:g} s"
            raise EngineError(
                f"the generation engine at {self._address.host}, port {self._address.port}, cannot be reached "
                f"({late or error}); if it runs, open the ports policy.generation.port_range_low to port_range_high "
                "between the nodes"
            ) from error
        self._writer.write(b"".join(self._unsent))
        self._unsent.clear()
        self._look()

    async def _introduced(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            await introduce(reader, writer, self._address.key, self._name)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def again(self) -> EngineStream:
        """Return another connection of the same client to the same actor, not made yet."""
        return EngineStream(self._name, self._address, self._loop)

    def send(self, message: ClientMessage) -> None:
        """Send a message. It is lost when the connection breaks, which `answers` then raises."""
        content = frame(message)
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._write(content)
        else:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for an answer any more
                self._loop.call_soon_threadsafe(self._write, content)

    async def answers(self) -> Answers:
        """Return what the engine says next.

        Raises `EngineError` when it says that it is dead, `TimeoutError` when it is silent, `OSError` or `EOFError`
        when the connection breaks.
        """
        assert self._reader is not None
        try:
            told = to_answers(await read_frame(self._reader))
        except (OSError, EOFError) as error:
            if self._num_looks > _MAX_LOOKS:
                raise TimeoutError from error
            raise
        self._num_looks = 0
        if told.failure:
            raise EngineError(told.failure)
        return told

    def close(self) -> None:
        """End the connection; what is sent from now on is lost."""
        if self._look_later is not None:
            self._look_later.cancel()
        if self._writer is not None:
            self._writer.close()

    def _look(self) -> None:
        """Break the connection after many looks without a message. A pause of this process counts as one look."""
        assert self._writer is not None
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            self._writer.transport.abort()
        else:
            self._look_later = self._loop.call_later(SILENCE_SECONDS / _MAX_LOOKS, self._look)

    def _write(self, content: bytes) -> None:
        if self._writer is None:
            self._unsent.append(content)
        elif not self._writer.is_closing():
            self._writer.write(content)


OVERLOAD = 2.0
"""An engine is overloaded for a group when its work for other prompts is more than this many times the other engines'
mean work: enough that uneven answers move no group, and far below what an engine beside idle ones has."""
_MAX_HOMES = 1 << 17  # remembered, the latest used: many times the prompts and rollouts that are in flight at once

Home = tuple[int, ...]  # a prompt, or a prompt and one of its rollouts


class Balance:
    """The work of each engine. Not safe for threads: the router calls it under its lock."""

    def __init__(self, num_engines: int) -> None:
        self.work = [0] * num_engines  # tokens of this client's requests
        self.work_of_others = [0] * num_engines  # tokens of the other clients' requests, as the engine said last
        self._of_prompt: Counter[tuple[int, int]] = Counter()  # work by engine and prompt; no entry is 0
        self._homes: OrderedDict[Home, int] = OrderedDict()  # the engine that sampled it last, the latest used last

    def choose(self, request: Request, closed: Container[int]) -> int | None:
        """Choose an engine that is not `closed` and add the request to its work; None when all are closed.

        A later turn of a rollout goes where its earlier turns went, whose KV is there. A sibling goes where the group
        is, so that the prompt is computed once, unless that engine is overloaded. Everything else goes to the engine
        with the least work.
        """
        prompt, rollout = (request.affinity,), (request.affinity, *request.sample[:1])
        engine = self._homes.get(rollout)
        if engine is None or engine in closed:
            engine = self._homes.get(prompt)
            if engine is None or engine in closed or self._is_overloaded(engine, request.affinity, closed):
                engine = self._least(request.affinity, closed)
        if engine is None:
            return None
        self._remember(prompt, engine)
        self._remember(rollout, engine)
        self._add(engine, request, 1)
        return engine

    def release(self, engine: int, request: Request) -> None:
        """Take a request off the work of the engine that `place` chose; once for each `place`."""
        self._add(engine, request, -1)

    def _add(self, engine: int, request: Request, sign: int) -> None:
        tokens = sign * request.work
        self.work[engine] += tokens
        self._of_prompt[engine, request.affinity] += tokens
        if not self._of_prompt[engine, request.affinity]:
            del self._of_prompt[engine, request.affinity]

    def _load(self, engine: int) -> int:
        return self.work[engine] + self.work_of_others[engine]

    def _is_overloaded(self, engine: int, affinity: int, closed: Container[int]) -> bool:
        others = (other for other in range(len(self.work)) if other != engine and other not in closed)
        elsewhere = [self._load(other) for other in others]
        here = self._load(engine) - self._of_prompt.get((engine, affinity), 0)
        return bool(elsewhere) and here * len(elsewhere) > OVERLOAD * sum(elsewhere)

    def _least(self, affinity: int, closed: Container[int]) -> int | None:
        """Return the open engine with the least work; of equal ones, prompts take turns."""
        size = len(self.work)
        engines = (engine for engine in range(size) if engine not in closed)
        return min(engines, key=lambda engine: (self._load(engine), (engine - affinity) % size), default=None)

    def _remember(self, home: Home, engine: int) -> None:
        self._homes[home] = engine
        self._homes.move_to_end(home)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)


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
        token_ids, session = self.prompt.part_for(engine, is_lost=self.is_session_lost)
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
            routes_from=session.routes_from(token_ids) if session else 0,
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
            if session is not None and completion.routes:
                session.routed(token_ids.plus(completion.token_ids))
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
                waiter.engine = self._balance.choose(waiter.request, unusable)
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
