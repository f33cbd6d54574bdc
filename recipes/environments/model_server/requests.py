"""Read a request of either API into one form, or say which field cannot be honoured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from recipes.environments.chat.messages import chat_messages
from recipes.environments.contract.rows import wrong
from recipes.environments.model_server.messages import ChatMessage, read_messages

CHAT, RESPONSES = "chat", "responses"
MAX_DEPTH, MAX_MESSAGES, MAX_TOOLS, MAX_STOPS = 64, 20_000, 512, 4
REPLACED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
UNENFORCED = ("response_format", "text.format", "parallel_tool_calls", "tool_choice")
_REFUSED = ("logit_bias", "background")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class ApiError(Exception):
    """A request that is answered with an error in the form of the OpenAI API."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What a client asks of the policy."""

    api: str  # CHAT or RESPONSES
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # in the nested form of the chat API
    reads_calls: bool = True  # false with tool_choice "none"
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    has_logprobs: bool = False
    is_stream: bool = False
    has_usage: bool = False  # at the end of a stream
    previous: str | None = None  # id of the response that it continues
    ends_in_reasoning: bool = False  # its last item is the assistant's reasoning and nothing else
    counts: Mapping[str, int] = field(default_factory=dict)  # of fields that have no effect


def read_request(api: str, body: bytes) -> ModelRequest:
    """Return the request in a body; raises `ApiError` 400 that names the field."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    if _is_deeper(value, MAX_DEPTH):
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        return _read(api, value)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _read(api: str, body: Mapping[str, Any]) -> ModelRequest:
    _refuse(body)
    key = "messages" if api == CHAT else "input"
    if isinstance(body.get(key), list) and len(body[key]) > MAX_MESSAGES:
        raise wrong(key, len(body[key]), f"at most {MAX_MESSAGES} entries")
    messages = read_messages(body.get("messages") if api == CHAT else _from_items(body))
    last = messages[-1]
    ends_in_reasoning = last.role == "assistant" and bool(last.reasoning) and not last.text and not last.calls
    if last.role == "assistant" and not ends_in_reasoning:
        raise wrong(key, "a last message of the assistant", "a last message of a user, a tool or the system")
    return ModelRequest(
        api=api,
        messages=messages,
        tools=_tools(body.get("tools")),
        reads_calls=body.get("tool_choice") != "none",
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        has_logprobs=body.get("logprobs") is True,
        is_stream=body.get("stream") is True,
        has_usage=(_mapping(body, "stream_options")).get("include_usage") is True,
        previous=_previous(body) if api == RESPONSES else None,
        ends_in_reasoning=ends_in_reasoning,
        counts=_without_effect(body),
    )


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse what would be answered wrongly if it were ignored."""
    if body.get("n") not in (None, 1):
        raise wrong("n", body["n"], "1: one answer per request")
    for name in _REFUSED:
        if body.get(name):
            raise wrong(name, body[name], "no value: it is not supported")


def _from_items(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a Responses request. Reasoning items become `<think>` blocks, as in rows."""
    items, instructions = body.get("input"), body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise wrong("instructions", instructions, "a string")
    if isinstance(items, list):
        items = [_named(item) for item in items if isinstance(item, Mapping)] or None
    return chat_messages({"input": items, "instructions": instructions})


def _named(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an item with a call id, which nothing but its place decides; some clients send none."""
    if item.get("type") == "reasoning" and not isinstance(item.get("summary") or [], list):
        raise wrong("input.summary", item["summary"], "a list of parts")
    if item.get("type") in ("function_call", "function_call_output") and not isinstance(item.get("call_id"), str):
        return {**item, "call_id": ""}
    return item


def _tools(tools: object) -> tuple[Mapping[str, Any], ...]:
    """Return function tools of either API in the nested form of the chat API."""
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise wrong("tools", tools if not isinstance(tools, list) else len(tools), f"a list of up to {MAX_TOOLS} tools")
    return tuple(_tool(tool) for tool in tools)


def _tool(tool: object) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise wrong("tools.type", tool.get("type") if isinstance(tool, Mapping) else tool, "function")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong("tools.function.name", tool, "a function with a name")
    kept = {key: value for key, value in function.items() if key not in ("type", "strict")}
    return {"type": "function", "function": kept}


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in _LIMITS:
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise wrong(name, value, "a positive integer")
            return value
    return None


def _stop(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop if stop is not None else []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise wrong("stop", stop, f"up to {MAX_STOPS} strings")
    return tuple(stops)


def _previous(body: Mapping[str, Any]) -> str | None:
    value = body.get("previous_response_id")
    if value is not None and not isinstance(value, str):
        raise wrong("previous_response_id", value, "the id of a response of this rollout")
    return value


def _without_effect(body: Mapping[str, Any]) -> Mapping[str, int]:
    """Count fields that the run's own sampling replaces, and constraints that sampling does not enforce."""
    counts: Counter[str] = Counter(f"replaced.{name}" for name in REPLACED if body.get(name) is not None)
    choice, text = body.get("tool_choice"), _mapping(body, "text")
    constraints = {
        "response_format": (body.get("response_format") or {}) not in ({}, {"type": "text"}),
        "text.format": (text.get("format") or {}) not in ({}, {"type": "text"}),
        "parallel_tool_calls": body.get("parallel_tool_calls") is False,
        "tool_choice": choice not in (None, "auto", "none"),
    }
    counts.update(f"unenforced.{name}" for name in UNENFORCED if constraints[name])
    return dict(counts)


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested deeper than `levels`; the parser itself bounds the depth."""
    level: Sequence[Any] = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
