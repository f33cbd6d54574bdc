"""Messages in the one form in which requests of all clients are compared, and what counts as the same message.

Clients change what they echo: they drop reasoning, write arguments with other spaces or key order, renumber calls. None
of that makes another conversation. Text, the order of calls, names and values of arguments do.

Read a request of either API into one form, or say which field cannot be honoured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from recipes.environments.chat.messages import chat_messages, flat_text, function_of
from recipes.environments.contract.rows import wrong
from recipes.exact_json import dumps, loads

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
        value = loads(body)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    if _is_deeper(value, MAX_DEPTH):
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        return _read_request(api, value)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _read_request(api: str, body: Mapping[str, Any]) -> ModelRequest:
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
        has_logprobs=_flag(body, "logprobs"),
        is_stream=_flag(body, "stream"),
        has_usage=_flag(_mapping(body, "stream_options"), "include_usage"),
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
        items = [_named(item) for item in items]
    return chat_messages({"input": items, "instructions": instructions})


def _named(item: object) -> Mapping[str, Any]:
    """Return an item with a call id, which nothing but its place decides; some clients send none."""
    if not isinstance(item, Mapping):
        raise wrong("input", item, "items that are objects")
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
    if not isinstance(tool, Mapping) or (tool.get("type") or "function") != "function":
        raise wrong("tools.type", tool.get("type") if isinstance(tool, Mapping) else tool, "function")
    function = tool.get("function") or tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong("tools.function.name", tool, "a function with a name")
    return {"type": "function", "function": function_of(function)}


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
    if value is not None and not isinstance(value, Mapping):
        raise wrong(name, value, "an object")
    return value or {}


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value is True


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


ROLES = ("system", "user", "assistant", "tool")
_LEADING_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """One function call of an assistant's message."""

    name: str
    arguments: str  # as written, JSON or not

    @property
    def compared(self) -> str:
        """The arguments in a form that is equal for equal values: sorted keys, no spaces, 2.0 as 2."""
        try:
            return dumps(_as_integers(loads(self.arguments)), sort_keys=True).decode()
        except (ValueError, TypeError, RecursionError):  # no JSON: only the same text is equal
            return self.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation. Reasoning and calls are the assistant's."""

    role: str  # one of ROLES
    text: str = ""
    reasoning: str = ""
    calls: tuple[CalledFunction, ...] = ()
    ids: tuple[str, ...] = ()  # of its calls; they only decide between answers that are otherwise the same
    without_stop: str | None = None  # its text without the stop string that a client put behind it

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of the chat API, reasoning in front of the text."""
        if self.role != "assistant":
            return {"role": self.role, "content": self.text}
        thoughts = f"<think>{self.reasoning}</think>" if self.reasoning else ""
        message: dict[str, Any] = {"role": "assistant", "content": thoughts + self.text}
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{n}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for n, c in enumerate(self.calls)
            ]
        return message


def read_messages(messages: object) -> tuple[ChatMessage, ...]:
    """Return the messages of a request of the chat API; raises `ValueError` that names the field."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list with at least one message")
    return tuple(_read(message) for message in messages)


def _read(message: object) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise wrong("messages", message, "messages that are objects")
    role = message.get("role")
    if not isinstance(role, str) or role not in (*ROLES, "developer"):
        raise wrong("messages.role", role, f"one of {', '.join(ROLES)}, developer")
    role = "system" if role == "developer" else role
    text = _text(message.get("content"))
    if role != "assistant":
        return ChatMessage(role=role, text=text)
    reasoning = next((message[key] for key in ("reasoning_content", "reasoning") if message.get(key)), "")
    if not isinstance(reasoning, str):
        raise wrong("messages.reasoning", reasoning, "a string")
    thoughts, end = [], 0
    while found := _LEADING_THOUGHTS.match(text, end):
        thoughts.append(found[1])
        end = found.end()
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise wrong("messages.tool_calls", calls, "a list of function calls")
    return ChatMessage(
        role=role,
        text=text[end:],
        reasoning=reasoning or "".join(thoughts),
        calls=tuple(_call(call) for call in calls),
        ids=tuple(call["id"] for call in calls if isinstance(call.get("id"), str)),
    )


def _text(content: object) -> str:
    """Return a message's content as one text; its parts may be texts only."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong("messages.content", content, "a string or a list of text parts")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise wrong("messages.content", kind, "text parts only")
    return flat_text(content)


def _call(call: object) -> CalledFunction:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("messages.tool_calls", call, "function calls with a name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        raise wrong("messages.tool_calls.function.arguments", arguments, "JSON text")
    return CalledFunction(name=function["name"], arguments=arguments or "")


def _as_integers(value: Any) -> Any:
    """Return a value in which each number that is whole is an integer."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _as_integers(inner) for key, inner in value.items()}
    return [_as_integers(inner) for inner in value] if isinstance(value, list) else value


def with_stops(message: ChatMessage, stops: Sequence[str]) -> ChatMessage:
    """Return a message with what it says without a stop string at its end.

    The engine ends an answer before its stop string; some clients put it back in what they echo.
    """
    text = message.text.rstrip()
    ends = [end for stop in stops if (end := stop.strip()) and text.endswith(end)]
    if message.role != "assistant" or not ends:
        return message
    return replace(message, without_stop=text.removesuffix(max(ends, key=len)))


def compared_text(message: ChatMessage) -> str:
    """Return the text that must be equal: an assistant's without the spaces around it and an echoed stop string."""
    if message.role != "assistant":
        return message.text
    return (message.text if message.without_stop is None else message.without_stop).strip()


def digests(messages: Sequence[ChatMessage], start: bytes = b"") -> list[bytes]:
    """Return one digest per message, of it and all before it, without reasoning and ids; `start` is that before them.

    Messages that `difference` calls the same have the same digest, reasoning apart.
    """
    chain, result = start, []
    for message in messages:
        digest = blake2b(chain, digest_size=16)
        calls = (part for call in message.calls for part in (call.name, call.compared))
        for part in (message.role, compared_text(message), *calls):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        chain = digest.digest()
        result.append(chain)
    return result


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a digest of function tools by name and schema; order, `strict` and the order of keys do not count."""
    functions = [tool.get("function", tool) for tool in tools]
    kept = [dumps({key: f[key] for key in f if key not in ("strict", "type")}, sort_keys=True) for f in functions]
    return blake2b(b"\0".join(sorted(kept)), digest_size=16).digest() if kept else b""


def difference(stored: ChatMessage, given: ChatMessage) -> str | None:
    """Return how a message of a request differs from the stored one, None when it is the same.

    An assistant's message may come back without its reasoning.
    """
    if stored.role != given.role:
        of_assistant = {stored.role: "assistant_missing", given.role: "foreign_assistant"}
        return of_assistant.get("assistant", _CHANGED.get(stored.role))
    if stored.calls and not given.calls and all(call.name in given.text for call in stored.calls):
        return "calls_as_text"
    if compared_text(stored) != compared_text(given):
        is_extended = stored.role == "assistant" and stored.text.strip() and given.text.startswith(stored.text.strip())
        return "assistant_text_extended" if is_extended else _CHANGED[stored.role]
    if [(c.name, c.compared) for c in stored.calls] != [(c.name, c.compared) for c in given.calls]:
        return "tool_calls_changed"
    if given.reasoning.strip() not in ("", stored.reasoning.strip()):
        return "reasoning_changed"
    return None


_CHANGED = {
    "system": "system_changed",
    "user": "user_changed",
    "tool": "tool_result_changed",
    "assistant": "assistant_text_changed",
}
REASONS = {  # why a request continues no earlier call -> what the agent does, and what helps
    "system_changed": "a system message is another one: keep dates, counters and lists of files out of it",
    "user_changed": "an earlier message of the user is another one: append, do not rewrite",
    "tool_result_changed": "an earlier answer of a tool is another one, such as a shortened one",
    "assistant_text_changed": "an answer came back with another text: echo it as it was",
    "assistant_text_extended": "an answer came back with text behind it: send what it did as a message of its own",
    "calls_as_text": "function calls came back as text: send them back as `tool_calls`, results with the role tool",
    "tool_calls_changed": "function calls came back with other names or arguments",
    "reasoning_changed": "reasoning came back with another text: echo it as it was, or leave it out",
    "assistant_missing": "an answer was left out of the history",
    "foreign_assistant": "the history has an answer that the policy did not give",
    "tools_changed": "the tools of the request are others",
    "history_shorter": "the history ends before that of an earlier call: it was cut or summed up",
    "sibling": "the same question was asked again",
    "thinking_stripped": "the template shows earlier answers without their reasoning, as `history: template` asks",
    "template_not_extendable": "the template shows an answer otherwise once something follows it",
}
