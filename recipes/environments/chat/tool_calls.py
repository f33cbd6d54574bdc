"""Read tool calls from the text of a turn, and flag a turn whose text holds unread calls or stray thinking tags.

Two notations are read, both between `<tool_call>` tags: a JSON object with `name` and `arguments`, and XML-like
`<function=NAME><parameter=KEY>value</parameter></function>`, whose values get the types of the tool's schema, as vLLM's
parser gives them.
When one call of a turn cannot be read, the turn has no calls: its text stays unchanged, and the flags see it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*?)</function>\s*", re.DOTALL)
_BETWEEN_FUNCTIONS = re.compile(r"(?<=</function>)\s*(?=<function=)")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>(.*?)</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call; `arguments` is JSON text of an object."""

    name: str
    arguments: str


def parse_tool_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text before the first call, and the calls; when a call is malformed, the whole text and no calls.

    `tools` are the tools of the request, in the nested form of the chat API; without tools nothing is a call.
    """
    start = text.find("<tool_call>")
    if start < 0 or not tools:
        return text, ()
    bodies = _closed(_CALL, text, "</tool_call>")
    if len(bodies) != text.count("<tool_call>"):
        return text, ()
    try:
        # A model may put several functions between one pair of tags, as vLLM reads them.
        calls = tuple(_parse_call(part, tools) for body in bodies for part in _BETWEEN_FUNCTIONS.split(body))
    except (ValueError, RecursionError):  # model text that is no call
        return text, ()
    return text[:start], calls


def _closed(pattern: re.Pattern[str], text: str, closing: str) -> list[Any]:
    """Return all matches up to the last closing tag: beyond it, every open tag costs a search to the end."""
    return pattern.findall(text, 0, text.rfind(closing) + len(closing))


def _parse_call(body: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    if match := _FUNCTION.fullmatch(body):
        name, inner = match.groups()
        schemas = _parameter_schemas(name, tools)
        arguments = {key: _typed(value, schemas.get(key)) for key, value in _closed(_PARAMETER, inner, "</parameter>")}
        return _tool_call(name, arguments)
    call = json.loads(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call needs a name")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return _tool_call(call["name"], arguments)


def _tool_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    text = json.dumps(arguments, ensure_ascii=False)
    (name + text).encode()  # an escape of half a surrogate pair has no UTF-8 form, and no request can carry it
    return ToolCall(name=name, arguments=text)


def _parameter_schemas(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    functions = [tool.get("function", tool) for tool in tools]
    parameters = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _typed(value: str, schema: Any) -> Any:
    """Return a parameter's text as the first type of its schema that it can be read as, in the order of `_READERS`."""
    value = value.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    for name, read in _READERS.items():
        if name in types:
            try:
                return read(value)
            except (ValueError, LookupError):
                continue
    try:
        return _json_value(value)
    except ValueError:
        return value


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows; a text where it names none."""
    if not isinstance(schema, Mapping):
        return {"string"}
    named = schema.get("type")
    found = {name.strip().lower() for name in _listed(named) or [named] if isinstance(name, str)}
    found |= {_TYPE_OF.get(type(value), "string") for value in _listed(schema.get("enum"))}
    for key in ("anyOf", "oneOf", "allOf"):
        found.update(*map(_types, _listed(schema.get(key))))
    return {_OTHER_NAMES.get(name, name) for name in found} or {"string"}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError(text)


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return int(value) if value.is_integer() else value


def _json_value(text: str) -> Any:
    value = json.loads(text)
    json.dumps(value, allow_nan=False)  # such a number is none of JSON
    return value


_TYPE_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_OTHER_NAMES = {  # of types, in schemas that follow no standard
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
    **{"bool": "boolean", "dict": "object"},
}
_READERS: Mapping[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": int,
    "number": _number,
    "boolean": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()],
    "object": _json_value,
    "array": _json_value,
    "string": lambda text: text,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagPatterns:
    """Texts that must not be left in a turn: `env.nemo_gym.invalid_tool_call_patterns` and `thinking_tags`."""

    invalid_tool_call: tuple[str, ...]
    thinking_tags: tuple[str, ...]


def turn_flags(item: Mapping[str, Any], patterns: FlagPatterns) -> tuple[bool, bool]:
    """Return (is_invalid_tool_call, has_malformed_thinking) of the last output item of one model call.

    Visible text may hold no pattern and no thinking tag; reasoning without an answer may hold each tag once.
    Function calls are never flagged. Only the first part of an item is looked at.
    """
    if (text := _first_text(item.get("content"))) is not None:
        limit = 0
    elif item.get("type") == "reasoning" and (text := _first_text(item.get("summary"))) is not None:
        limit = 1
    else:
        return False, False
    is_invalid = any(pattern in text for pattern in patterns.invalid_tool_call)
    return is_invalid, any(text.count(tag) > limit for tag in patterns.thinking_tags)


def _first_text(parts: object) -> str | None:
    if isinstance(parts, list) and parts and isinstance(parts[0], Mapping):
        text = parts[0].get("text")
        return text if isinstance(text, str) else None
    return None
