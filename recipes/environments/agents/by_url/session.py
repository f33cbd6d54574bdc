"""One rollout as its model server sees it: its calls, from request to stored answer.

    request -> retry of an earlier one? -> attach -> prompt -> engine -> node of the forest -> answer

A retry joins the call that still runs, or gets the stored answer again, so that a client that gives up waiting and asks
again costs nothing. Attaching comes before the engine and storing after it; nothing is locked in between, so two calls
may extend one node. A call that fails, or that nobody waits for any more, leaves no node.

An answer is written in the form of either API, whole or as the events of a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recipes import routes
from recipes.environments.agents.by_url.forest import (
    CallNode,
    Forest,
    Prompt,
    PromptBuilder,
    cut_at_stop,
    text_before_stop,
)
from recipes.environments.agents.by_url.messages import (
    CHAT,
    ApiError,
    CalledFunction,
    ChatMessage,
    ModelRequest,
    tools_digest,
    with_stops,
)
from recipes.environments.agents.conversation import make_turn, unusable
from recipes.environments.chat.codec import ChatCodec, Decoded
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.contract.verifier import Item
from recipes.errors import EngineError, RequestError
from recipes.exact_json import dumps
from recipes.types import Completion, ModelClient

MODEL = "policy"  # the name under which the policy is served


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """One answer of the policy."""

    number: int  # of the call in its rollout; ids are made of it
    text: str
    reasoning: str
    calls: tuple[tuple[str, CalledFunction], ...]  # each with its id
    finish_reason: str  # stop, length, tool_calls or content_filter
    created: int  # seconds since 1970
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    logprobs: tuple[tuple[str, float], ...] = ()  # each token's text and log-probability, when they are asked for
    tokens: Mapping[str, Any] = field(default_factory=dict)  # ids, which only NeMo Gym's own agents are shown


def whole_reply(answer: ModelAnswer, request: ModelRequest) -> dict[str, Any]:
    """Return the JSON object of an answer."""
    return _chat_reply(answer, request) if request.api == CHAT else _response(answer, _items(answer))


def stream_events(answer: ModelAnswer, request: ModelRequest) -> Iterator[bytes]:
    """Yield the events of an answer that is complete, without the one that ends the stream."""
    yield from _chat_events(answer, request) if request.api == CHAT else _response_events(answer)


def last_event(answer: ModelAnswer, request: ModelRequest) -> bytes:
    """Return the event that ends a stream; it is sent once the call is stored."""
    if request.api == CHAT:
        return b"data: [DONE]\n\n"
    response = _response(answer, _items(answer))
    kind = f"response.{response['status']}"
    return _event({"type": kind, "response": response, "sequence_number": _NUM_LAST}, name=kind)


def error_event(error: ApiError, request: ModelRequest) -> bytes:
    """Return the event that ends a stream whose call failed."""
    body = error.body()
    if request.api == CHAT:
        return _event(body)
    response = {"id": "resp_failed", "object": "response", "status": "failed", "output": [], "model": MODEL}
    failed = {**response, "error": {"code": error.code or "server_error", "message": str(error)}}
    return _event({"type": "response.failed", "response": failed, "sequence_number": 0}, name="response.failed")


_NUM_LAST = 1_000_000  # above every other event's number


def _event(value: Mapping[str, Any], *, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(value) + b"\n\n"


# -- chat completions ---------------------------------------------------------------------------------------------


def _chat_reply(answer: ModelAnswer, request: ModelRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    message |= _chat_reasoning(answer)
    if answer.calls:
        message["tool_calls"] = _chat_calls(answer)
    message |= answer.tokens
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    if request.has_logprobs:
        choice["logprobs"] = {"content": _chat_logprobs(answer)}
    return {**_chat_head(answer, "chat.completion"), "choices": [choice], "usage": _chat_usage(answer)}


def _chat_reasoning(answer: ModelAnswer) -> dict[str, str]:
    return {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning} if answer.reasoning else {}


def _chat_head(answer: ModelAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": answer.created, "model": MODEL}


def _chat_calls(answer: ModelAnswer) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call_id, call in answer.calls
    ]


def _chat_logprobs(answer: ModelAnswer) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, logprob in answer.logprobs
    ]


def _chat_usage(answer: ModelAnswer) -> dict[str, int]:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _chat_events(answer: ModelAnswer, request: ModelRequest) -> Iterator[bytes]:
    head = _chat_head(answer, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event({**head, "choices": [choice]})

    logprobs = {"content": _chat_logprobs(answer)} if request.has_logprobs else None
    yield chunk({"role": "assistant", "content": ""}, logprobs=logprobs)
    if answer.reasoning:
        yield chunk(_chat_reasoning(answer))
    if answer.text:
        yield chunk({"content": answer.text})
    for index, call in enumerate(_chat_calls(answer)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason)
    if request.has_usage:
        yield _event({**head, "choices": [], "usage": _chat_usage(answer)})


# -- responses ----------------------------------------------------------------------------------------------------


def _items(answer: ModelAnswer) -> list[Item]:
    items: list[Item] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        items.append({"id": f"rs_{answer.number}", "type": "reasoning", "summary": summary})
    if answer.text or not (answer.calls or answer.reasoning):
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        items.append(
            {
                "id": f"msg_{answer.number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call_id, call in answer.calls:
        named = {"call_id": call_id, "name": call.name, "arguments": call.arguments}
        items.append({"id": f"fc_{call_id}", "type": "function_call", "status": "completed", **named})
    items[-1] |= answer.tokens
    return items


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def _response(answer: ModelAnswer, output: Sequence[Item], *, status: str = "") -> dict[str, Any]:
    reason = _INCOMPLETE.get(answer.finish_reason)
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": answer.created,
        "model": MODEL,
        "output": list(output),
        "status": status or ("incomplete" if reason else "completed"),
        "incomplete_details": {"reason": reason} if reason and not status else None,
        "error": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _response_events(answer: ModelAnswer) -> Iterator[bytes]:
    for number, event in enumerate(_plain_response_events(answer)):
        yield _event({**event, "sequence_number": number}, name=event["type"])


def _plain_response_events(answer: ModelAnswer) -> Iterator[dict[str, Any]]:
    begun = _response(answer, [], status="in_progress")
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(_items(answer)):
        at = {"item_id": item["id"], "output_index": index}
        empty = {**item, "status": "in_progress"} | {key: [] for key in ("content", "summary") if key in item}
        if item["type"] == "function_call":
            empty["arguments"] = ""
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield from _inner_events(item, at)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _inner_events(item: Item, at: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events within one item: its parts, its text, its arguments."""
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
        named = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **at, **named}
        return
    is_message = item["type"] == "message"
    part = (item["content"] if is_message else item["summary"])[0]
    kind = ("content_part", "output_text") if is_message else ("reasoning_summary_part", "reasoning_summary_text")
    place = {**at, ("content_index" if is_message else "summary_index"): 0}
    further: dict[str, Any] = {"logprobs": []} if is_message else {}
    yield {"type": f"response.{kind[0]}.added", **place, "part": {**part, "text": ""}}
    yield {"type": f"response.{kind[1]}.delta", **place, "delta": part["text"], **further}
    yield {"type": f"response.{kind[1]}.done", **place, "text": part["text"], **further}
    yield {"type": f"response.{kind[0]}.done", **place, "part": part}


logger = logging.getLogger(__name__)

RETRY_SECONDS = 5  # that a client is asked to wait after a 503
MAX_CALLS = 1024  # of one rollout
MAX_CONTEXTS = 64  # of tokens that one rollout stores: rewritten histories would else fill the memory
COMPARED = 100  # the first suffix of a rollout, and each of this many, is compared with the whole rendering


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds on the calls of one rollout."""

    max_tokens: int  # of one answer
    num_calls: int = MAX_CALLS
    num_running: int = 8  # at the same time; further ones wait
    call_seconds: float = 3600.0  # of one call, waiting included
    grace_seconds: float = 90.0  # a call that nobody waits for goes on for so long: a retry may join it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The answer of a call, and its node; None for an answer that nothing was sampled for."""

    answer: ModelAnswer
    node: CallNode | None


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call in progress or done, and who waits for it."""

    task: asyncio.Task[Stored]
    num_waiting: int = 0
    is_delivered: bool = False
    end_of_grace: asyncio.TimerHandle | None = None

    def is_repeated_by(self, num_retries: int) -> bool:
        """Return whether the same request, now, is a retry: the client says so, or nobody has got the answer."""
        was_taken = self.num_waiting > 0 or self.is_delivered
        return not self.task.cancelling() and (num_retries > 0 or not was_taken)


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutSession:
    """The calls of one rollout. It belongs to one event loop."""

    codec: ChatCodec
    model: ModelClient
    patterns: FlagPatterns
    limits: SessionLimits
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_history: bool = True
    forest: Forest = field(default_factory=Forest)
    counts: Counter[str] = field(default_factory=Counter)  # for the log; the forest has those of forks and roots
    engine_failed: asyncio.Event = field(default_factory=asyncio.Event)
    engine_failure: EngineError | None = None  # no engine is left: the run must end
    is_over: bool = False
    is_full: bool = False  # the latest call found no room in the context
    failure: str = ""  # why we could not answer the latest call; "" once a later one is answered
    num_calls: int = 0  # that were begun, failed ones included
    _calls: dict[bytes, Call] = field(default_factory=dict)  # the latest of each request
    _running: set[asyncio.Task[Stored]] = field(default_factory=set)
    _responses: dict[str, CallNode] = field(default_factory=dict)  # by id
    _stops: set[str] = field(default_factory=set)  # of all requests
    _num_extended: int = 0
    _num_tokens: int = 0  # that are stored
    _function_ids: itertools.count[int] = field(default_factory=itertools.count)
    _slots: asyncio.Semaphore = field(init=False)
    _prompts: PromptBuilder = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.limits.num_running)
        self._prompts = PromptBuilder(
            forest=self.forest, codec=self.codec, template_kwargs=self.template_kwargs, keeps_history=self.keeps_history
        )

    def start(self, request: ModelRequest, body: bytes, *, num_retries: int, is_gym: bool) -> Call:
        """Begin the call of a request, or return the earlier one of which it is a retry; raises `ApiError`.

        Whoever waits for it says so with `wait` and `leave`.
        """
        if self.is_over:
            raise over()
        digest = hashlib.blake2b(request.api.encode() + body, digest_size=16).digest()
        earlier = self._calls.get(digest)
        if earlier is not None and earlier.is_repeated_by(num_retries):
            self.counts["retries"] += 1
            return earlier
        if self.is_spent:
            self.end()
            raise over()
        call = Call(task=asyncio.create_task(self._run(self.num_calls, request, is_gym=is_gym)))
        self.num_calls += 1
        self._calls[digest] = call
        self._running.add(call.task)
        call.task.add_done_callback(lambda task: self._ended(digest, call, task))
        return call

    @property
    def is_spent(self) -> bool:
        """Whether the rollout has no further call: it made all, or they took all the tokens that are kept of one."""
        return self.num_calls >= self.limits.num_calls or self._num_tokens >= MAX_CONTEXTS * self.model.max_model_len

    def wait(self, call: Call) -> None:
        """Note that a connection waits for a call."""
        call.num_waiting += 1
        if call.end_of_grace is not None:
            call.end_of_grace.cancel()
            call.end_of_grace = None

    def leave(self, call: Call, *, is_delivered: bool) -> None:
        """Note that a connection waits no more; a running call that nobody waits for ends after the grace time."""
        call.num_waiting -= 1
        if is_delivered:
            call.is_delivered = True
            node = call.task.result().node
            if node is not None:
                node.is_delivered = True
        if call.num_waiting == 0 and not call.task.done():
            loop = asyncio.get_running_loop()
            call.end_of_grace = loop.call_later(self.limits.grace_seconds, call.task.cancel)

    def end(self) -> None:
        """End the rollout: running calls are cancelled, later ones refused."""
        self.is_over = True
        for task in list(self._running):
            task.cancel()

    def _ended(self, digest: bytes, call: Call, task: asyncio.Task[Stored]) -> None:
        self._running.discard(task)
        if call.end_of_grace is not None:
            call.end_of_grace.cancel()
        has_failed = task.cancelled() or task.exception() is not None
        if has_failed and self._calls.get(digest) is call:  # a retry of a failed call is sampled anew
            del self._calls[digest]

    async def _run(self, number: int, request: ModelRequest, *, is_gym: bool) -> Stored:
        self.counts.update(request.counts)
        try:
            async with asyncio.timeout(self.limits.call_seconds), self._slots:
                return await self._answer(number, request, is_gym=is_gym)
        except TimeoutError as error:
            self.counts["late_calls"] += 1
            self.failure = f"no answer within {self.limits.call_seconds:g} s"
            raise ApiError(503, self.failure) from error
        except EngineError as error:
            self.engine_failure = error
            self.engine_failed.set()
            raise ApiError(503, "the policy has no engine left") from error
        except RequestError as error:
            raise self._failed(str(error)) from error
        except ApiError:
            raise
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    async def _answer(self, number: int, request: ModelRequest, *, is_gym: bool) -> Stored:
        if request.ends_in_reasoning:
            if not is_gym:
                raise ApiError(400, "field 'messages': got a last message of the assistant, expected another role's")
            return Stored(answer=_empty(number, "content_filter"), node=None)
        keeps_tools = not request.tools and not request.reads_calls
        tools = tools_digest(request.tools)
        self._stops |= set(request.stop)
        messages = [with_stops(message, sorted(self._stops)) for message in request.messages]
        attachment = self.forest.attach(messages, tools, keeps_tools=keeps_tools, after=self._previous(request))
        compares = attachment.parent is not None and self._num_extended % COMPARED == 0
        self._num_extended += attachment.parent is not None
        prompt = await asyncio.to_thread(self._prompts.build, attachment, request.tools, compares=compares)
        self.counts["suffix_mismatches"] += prompt.has_matched is False
        prompt_ids = prompt.seen_ids.plus(prompt.new_ids)
        limit = min(request.max_tokens or self.limits.max_tokens, self.limits.max_tokens)
        completion = await self.model.generate(prompt_ids, max_tokens=limit)
        if not completion.token_ids and completion.finish_reason == "length":
            return self._overflow(number, len(prompt_ids), limit, is_gym=is_gym)
        if problem := unusable(completion, num_prompt_tokens=len(prompt_ids)):
            raise self._failed(problem)
        if keeps_tools and prompt.attachment.parent is not None:
            tools = prompt.attachment.parent.tools
        decoded = await asyncio.to_thread(_sampled, self.codec, request, prompt, completion)
        if self.is_over:
            raise over()
        return self._store(number, request, prompt, decoded, tools=tools, is_gym=is_gym)

    def _failed(self, reason: str) -> ApiError:
        """Note that the engine failed a call, and return what the agent is told."""
        self.failure = reason
        self.counts["failed_calls"] += 1
        logger.warning("a model call of an agent failed: %s", reason)
        return ApiError(500, "the engine failed")

    def _previous(self, request: ModelRequest) -> CallNode | None:
        if request.previous is None:
            return None
        if request.previous not in self._responses:
            raise ApiError(
                400, f"field 'previous_response_id': no response of this rollout is {request.previous[:80]!r}"
            )
        return self._responses[request.previous]

    def _overflow(self, number: int, num_prompt: int, limit: int, *, is_gym: bool) -> Stored:
        """Answer a call whose prompt fills the context, in the words that agents look for."""
        self.is_full, self.failure = True, ""
        self.counts["full_contexts"] += 1
        if is_gym:
            return Stored(answer=_empty(number, "length"), node=None)
        raise ApiError(
            400,
            f"This model's maximum context length is {self.model.max_model_len} tokens. However, you requested "
            f"{num_prompt + limit} tokens ({num_prompt} in the messages, {limit} in the completion). Please reduce "
            "the length of the messages or completion.",
            code="context_length_exceeded",
            param="messages",
        )

    def _store(
        self, number: int, request: ModelRequest, prompt: Prompt, sampled: _Sampled, *, tools: bytes, is_gym: bool
    ) -> Stored:
        """Add a call to the forest and return its answer."""
        completion = sampled.completion
        calls = tuple((f"call_{next(self._function_ids)}", call) for call in sampled.calls)
        served = ChatMessage(
            role="assistant",
            text=sampled.text,
            reasoning=sampled.reasoning,
            calls=sampled.calls,
            ids=tuple(call_id for call_id, _ in calls),
        )
        node = self.forest.add(
            prompt.attachment,
            served=served,
            turn=make_turn(prompt.new_ids, completion, sampled.decoded, self.patterns, sampled.tools),
            tools=tools,
            is_thinking_open=sampled.is_thinking_open,
        )
        self.is_full, self.failure = False, ""
        self._num_tokens += len(prompt.new_ids) + len(completion.token_ids)
        self._responses[f"resp_{number}"] = node
        answer = ModelAnswer(
            number=number,
            text=served.text,
            reasoning=served.reasoning,
            calls=calls,
            finish_reason="tool_calls" if calls else completion.finish_reason,
            created=int(time.time()),
            num_prompt_tokens=len(prompt.seen_ids) + len(prompt.new_ids),
            num_sampled_tokens=len(completion.token_ids),
            logprobs=sampled.logprobs,
            tokens=_token_fields(prompt, completion) if is_gym else {},
        )
        return Stored(answer=answer, node=node)


def over() -> ApiError:
    """Return the answer to each call of a rollout that has ended, and of one that never was."""
    return ApiError(404, "the rollout is over", code="rollout_over")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """A completion, read."""

    completion: Completion  # up to the first stop string
    decoded: Decoded
    text: str
    reasoning: str
    calls: tuple[CalledFunction, ...]
    is_thinking_open: bool
    logprobs: tuple[tuple[str, float], ...]  # of each token with its text, when they are asked for
    tools: Sequence[Mapping[str, Any]]  # whose calls are read


def _sampled(codec: ChatCodec, request: ModelRequest, prompt: Prompt, completion: Completion) -> _Sampled:
    """Read a completion. Behind a stop string its tokens are dropped, as if the engine had stopped there."""
    cut = cut_at_stop(codec, completion.token_ids, request.stop)
    if cut is not None:
        completion = shortened(completion, cut, num_prompt_tokens=len(prompt.seen_ids) + len(prompt.new_ids))
    tools = [{"type": "function", **tool["function"]} for tool in request.tools] if request.reads_calls else []
    is_cut = completion.finish_reason == "length"
    decoded = codec.decode(completion.token_ids, prompt_ids=prompt.new_ids, tools=tools, is_cut=is_cut)
    items = decoded.items
    summaries = [part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    called = [item for item in items if item["type"] == "function_call"]
    return _Sampled(
        completion=completion,
        decoded=decoded,
        text=text if cut is None else text_before_stop(text, request.stop),
        reasoning="".join(summaries),
        calls=tuple(CalledFunction(name=item["name"], arguments=item["arguments"]) for item in called),
        is_thinking_open=codec.is_thinking_open(prompt.new_ids, completion.token_ids),
        logprobs=_with_texts(codec, completion) if request.has_logprobs else (),
        tools=tools,
    )


def _with_texts(codec: ChatCodec, completion: Completion) -> tuple[tuple[str, float], ...]:
    texts = (codec.text((token_id,)) for token_id in completion.token_ids)
    return tuple(zip(texts, completion.logprobs, strict=True))


def shortened(completion: Completion, length: int, *, num_prompt_tokens: int) -> Completion:
    """Return the first `length` tokens of a completion."""
    spans = (replace(span, end=min(span.end, length)) for span in completion.versions if span.start < length)
    return Completion(
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        versions=tuple(spans),
        finish_reason="stop",
        routes=routes.cut(completion.routes, num_prompt_tokens + length),
    )


def _token_fields(prompt: Prompt, completion: Completion) -> dict[str, list[int] | list[float]]:
    return {
        "prompt_token_ids": [*prompt.seen_ids, *prompt.new_ids],
        "generation_token_ids": list(completion.token_ids),
        "generation_log_probs": list(completion.logprobs),
    }


def _empty(number: int, finish_reason: str) -> ModelAnswer:
    """Return an answer that nothing was sampled for."""
    created = int(time.time())
    return ModelAnswer(number=number, text="", reasoning="", calls=(), finish_reason=finish_reason, created=created)
