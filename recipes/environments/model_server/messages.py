"""Messages in the one form in which requests of all clients are compared, and what counts as the same message.

Clients change what they echo: they drop reasoning, write arguments with other spaces or key order, renumber calls. None
of that makes another conversation. Text, the order of calls, names and values of arguments do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from recipes.environments.chat.messages import flat_text
from recipes.environments.contract.rows import wrong

ROLES = ("system", "user", "assistant", "tool")
_LEADING_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledFunction:
    """One function call of an assistant's message."""

    name: str
    arguments: str  # as written, JSON or not

    @property
    def compared(self) -> str:
        """The arguments in a form that is equal for equal values: sorted keys, no spaces, numbers as float64."""
        try:
            return orjson.dumps(_as_floats(orjson.loads(self.arguments)), option=orjson.OPT_SORT_KEYS).decode()
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


def _as_floats(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return float(value)
    if isinstance(value, dict):
        return {key: _as_floats(inner) for key, inner in value.items()}
    return [_as_floats(inner) for inner in value] if isinstance(value, list) else value


def compared_text(message: ChatMessage) -> str:
    """Return the text that must be equal: an assistant's without the spaces around it."""
    return message.text.strip() if message.role == "assistant" else message.text


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
    kept = [
        orjson.dumps({key: f[key] for key in f if key not in ("strict", "type")}, option=orjson.OPT_SORT_KEYS)
        for f in functions
    ]
    return blake2b(b"\0".join(sorted(kept)), digest_size=16).digest() if kept else b""


def difference(stored: ChatMessage, given: ChatMessage) -> str | None:
    """Return how a message of a request differs from the stored one, None when it is the same.

    An assistant's message may come back without its reasoning.
    """
    if stored.role != given.role:
        of_assistant = {stored.role: "assistant_missing", given.role: "foreign_assistant"}
        return of_assistant.get("assistant", _CHANGED.get(stored.role))
    if compared_text(stored) != compared_text(given):
        return _CHANGED[stored.role]
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
