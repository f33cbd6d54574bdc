"""Write one answer in the form of either API, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from recipes.environments.contract.responses import Item
from recipes.environments.model_server.messages import CalledFunction
from recipes.environments.model_server.requests import CHAT, ApiError, ModelRequest

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
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


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
