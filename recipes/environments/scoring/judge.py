"""A judge model behind an OpenAI-compatible server: chat completions out, Responses objects back.

A teacher of distillation is asked by the same client, by other requests (recipes/rollouts/teachers.py).

Each question is bounded in time and asked again after failures of transport or of the server, within that time. The
time runs once the question has its turn: at most `max_concurrency` are asked at once, the others wait here.

A server that finds a question too long for its model is asked again without the middle of the longest message, up to
HALVINGS times with half as much each time. Such a reply has `is_shortened`; verdicts count them as SHORTENED.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from recipes.environments.contract.http import JsonClient, RefusedError
from recipes.environments.contract.verifier import (
    JudgeQuestion,
    NoReply,
    Response,
    message_item,
    reasoning_item,
    response_object,
    without_controls,
)
from recipes.exact_json import dumps
from recipes.retry import ALWAYS, NoReplyError, RetryPolicy, reply_within

T = TypeVar("T")
# The time of a question is the only limit.
RETRIES = RetryPolicy(
    max_retries=ALWAYS, max_unreached_retries=ALWAYS, first_seconds=0.4, max_seconds=16.0, jitter=0.25
)
SHORTENED = "judge_questions_shortened"  # metric: questions of which the judge has not seen the middle
HALVINGS = 6  # of a question that is too long: a sixty-fourth of a megabyte fits any judge
SHORTEST = 2_000  # characters of a message that stays whole
_TOO_LONG = re.compile(r"context length|too long|max_model_len", re.IGNORECASE)  # in the refusals of servers
_CHAT_NAMES = {"max_output_tokens": "max_tokens"}  # Responses name -> chat completions name


class JudgeFailedError(Exception):
    """A judge gave no usable reply within its time; the message names the server and the cause."""


@dataclass(slots=True, kw_only=True)
class JudgeClient:
    """One judge: its servers, asked in turn, and how."""

    name: str  # of the model server in the configuration
    urls: tuple[str, ...]  # base addresses, up to and with `/v1`
    model: str
    params: Mapping[str, Any]  # of every request, in Responses names
    timeout_seconds: float  # for one question with all its retries; waiting for a free place does not count
    max_concurrency: int
    api_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request
    http: JsonClient = field(default_factory=JsonClient)
    cached_replies: int = 10_000  # of questions that are always answered alike (temperature 0)
    _turn: Iterator[int] = field(default_factory=itertools.count)
    _cache: OrderedDict[bytes, Response] = field(default_factory=OrderedDict)
    _gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=dict)

    async def ask(self, questions: Sequence[JudgeQuestion]) -> list[Response]:
        """Return one reply per question, all asked at once; raises `JudgeFailedError` when one has none."""
        tasks = [asyncio.ensure_future(self._ask(question)) for question in questions]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def ask_each(self, questions: Sequence[JudgeQuestion], *, seconds: float) -> list[Response | NoReply]:
        """Return one reply per question, all asked at once; `NoReply` for each that has none within `seconds`."""
        tasks = [asyncio.ensure_future(self._ask(question)) for question in questions]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=seconds)
            return [_reply_or_reason(task, f"{self.name}: no reply in the time that its group has") for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    def ask_at(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Ask at the addresses of this name, if there are any, from the next request on."""
        self.urls = tuple(addresses.get(self.name, self.urls))

    async def within_time(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt` returns, once there is a free place, tried again as its failures allow.

        Raises `JudgeFailedError` when there is nothing within the time of a question, or the server refuses.
        """
        try:
            async with self._gate():
                return await reply_within(self.timeout_seconds, attempt, RETRIES)
        except (NoReplyError, RefusedError) as error:
            raise JudgeFailedError(f"{self.name}: {error}") from error

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Post once to the server whose turn it is; returns the body of its reply."""
        if not self.urls:
            raise RefusedError("it has no address: the run has not started it")
        url = self.urls[next(self._turn) % len(self.urls)].rstrip("/")
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        reply = await self.http.post(f"{url}/{path}", body, headers=headers)
        return reply.body

    async def _ask(self, question: JudgeQuestion) -> Response:
        request = chat_request(question, self.model, {**self.params, **question.params}, self.extra)
        key = hashlib.sha256(dumps(request, sort_keys=True)).digest()
        is_fixed = request.get("temperature") == 0
        if is_fixed and key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        reply = await self.within_time(lambda: self._post_what_fits(request))
        if is_fixed:
            self._cache[key] = reply
            while len(self._cache) > self.cached_replies:
                self._cache.popitem(last=False)
        return reply

    async def _post_what_fits(self, request: Mapping[str, Any]) -> Response:
        for _ in range(HALVINGS):
            try:
                return await self._post(request)
            except RefusedError as error:
                shorter = halved(request) if _TOO_LONG.search(str(error)) else None
                if shorter is None:
                    raise
                request = shorter
        return await self._post(request)

    async def _post(self, request: Mapping[str, Any]) -> Response:
        sent = {key: value for key, value in request.items() if key != "is_shortened"}
        response = response_of(await self.post("chat/completions", sent))
        return {**response, "is_shortened": True} if "is_shortened" in request else response

    def _gate(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = asyncio.Semaphore(self.max_concurrency)
        return self._gates[loop]


def _reply_or_reason(task: asyncio.Task[Response], late: str) -> Response | NoReply:
    if not task.done():
        return NoReply(reason=late)
    failure = task.exception()
    if failure is None:
        return task.result()
    if isinstance(failure, JudgeFailedError):
        return NoReply(reason=str(failure))
    raise failure


def chat_request(
    question: JudgeQuestion, model: str, params: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a chat completions request.

    Half a surrogate pair, which an answer may hold and no request can carry, becomes a question mark: an answer must
    not get out of its judgement by it. Control strings (`without_controls`) are broken, whoever wrote them, but for the
    marks of its template.
    """
    messages = [{"role": role, "content": _plain(text, question.marks)} for role, text in question.messages]
    named = {_CHAT_NAMES.get(name, name): value for name, value in params.items() if value is not None}
    return {"model": model, "messages": messages, **named, **extra}


def _plain(text: str, marks: Sequence[str]) -> str:
    return without_controls(text.encode(errors="replace").decode(), marks)


def halved(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a request without the middle half of its longest message, None where no message is long."""
    messages = list(request["messages"])
    place = max(range(len(messages)), key=lambda index: len(messages[index]["content"]))
    text = messages[place]["content"]
    if len(text) <= SHORTEST:
        return None
    kept = len(text) // 4
    note = f"\n[... {len(text) - 2 * kept} characters left out ...]\n"
    messages[place] = {**messages[place], "content": text[:kept] + note + text[-kept:]}
    return {**request, "messages": messages, "is_shortened": True}


def response_of(completion: Mapping[str, Any]) -> Response:
    """Return a chat completion as a Responses object; raises `RefusedError` when it is none.

    Reasoning that the server has split off comes first, as an item of its own. Without text there is no message: a
    judge that was cut off while thinking has said nothing.
    """
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise RefusedError(f"the reply has no choices[0].message: {str(completion)[:200]}")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    text = message.get("content")
    items = [reasoning_item([reasoning])] if isinstance(reasoning, str) and reasoning else []
    items += [message_item(text)] if isinstance(text, str) and text else []
    is_cut = choice.get("finish_reason") == "length"
    return response_object(items, incomplete_reason="max_output_tokens" if is_cut else None)
