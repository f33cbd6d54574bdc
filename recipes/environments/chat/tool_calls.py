"""Read tool calls from the text of a turn, and flag a turn whose text holds unread calls or stray thinking tags.

Each notation is read as vLLM's parser of that name reads it, so that what is served and what is trained are the same
calls; where this differs on purpose, the table of decisions in the README of the environments says so. A turn without
calls keeps its text unchanged, and the flags see it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OPENING = re.compile(r"<tool_call>|<function=")  # in a text
_IN_CALL = re.compile(r"<function=|</tool_call>")  # behind <tool_call>
_BEHIND_FUNCTION = re.compile(r"</tool_call>|<tool_call>|<function=")
_IN_NAME = re.compile(r"</function>|</?tool_call>|</?think>|</parameter>|>")  # a whole tag is a part of the name
_SPACE = r"[^\S\x1c-\x1f]*"  # the white space of Unicode; Python's has four separators more
_PARAMETER = re.compile(f"<{_SPACE}parameter{_SPACE}={_SPACE}")
_END_OF_VALUE = re.compile(f"<{_SPACE}(?:/{_SPACE}parameter{_SPACE}>|parameter{_SPACE}=)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call; `arguments` is JSON text of an object."""

    name: str
    arguments: str


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]], *, notation: str = "qwen3_coder", is_cut: bool = False
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text before the first call, and the calls; where nothing is a call, the whole text and no calls.

    `tools` are the tools of the request, in the nested form of the chat API; without tools nothing is a call.
    `is_cut`: the text ended at the limit of tokens; then a call that is not closed makes nothing of it a call.
    """
    if not tools:
        return text, ()
    try:
        before, calls = NOTATIONS[notation](text, tools, is_cut)
        for call in calls:
            (call.name + call.arguments).encode()  # half of a surrogate pair has no UTF-8 form; no request carries it
    except (ValueError, RecursionError):  # model text that is no call
        return text, ()
    return (before, calls) if calls else (text, ())


def _xml_calls(text: str, tools: Sequence[Mapping[str, Any]], is_cut: bool) -> tuple[str, tuple[ToolCall, ...]]:
    """Read `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.

    Only `</function>` ends a function: whatever else is missing or in its place, the parser of vLLM reads over it.
    """
    calls: list[ToolCall] = []
    start, end, tags = -1, 0, _OPENING
    while tag := tags.search(text, end):
        start, end = (tag.start() if start < 0 else start), tag.end()
        if tag[0] != "<function=":
            tags = _IN_CALL if tag[0] == "<tool_call>" else _OPENING
            continue
        name, body, end = _function(text, end)
        if end < 0 and is_cut:
            raise ValueError("a function that was cut")
        if name.strip():
            calls.append(_xml_call(name.strip(), body, tools))
        if end < 0:
            break
        tags = _BEHIND_FUNCTION
    if is_cut and tags is _IN_CALL:
        raise ValueError("a call that was cut")
    return text[: max(start, 0)].strip(), tuple(calls)


def _function(text: str, start: int) -> tuple[str, str, int]:
    """Return a function's name, its body and where it ends, -1 when `</function>` is missing."""
    end = next((tag for tag in _IN_NAME.finditer(text, start) if tag[0] in (">", "</function>")), None)
    if end is None:
        return text[start:], "", -1
    name = text[start : end.start()]
    if end[0] == "</function>":
        return name, "", end.end()
    closing = text.find("</function>", end.end())
    return (
        (name, text[end.end() :], -1)
        if closing < 0
        else (name, text[end.end() : closing], closing + len("</function>"))
    )


def _xml_call(name: str, body: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    schemas = _parameter_schemas(name, tools)
    arguments = {key: _typed(value, schemas.get(key)) for key, value in _parameters(body).items()}
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _parameters(body: str) -> dict[str, str]:
    """Return the parameters of a function. A value ends at its closing tag or at the next parameter's tag."""
    found: dict[str, str] = {}
    end = 0
    while opening := _PARAMETER.search(body, end):
        value = body.find(">", opening.end()) + 1
        closing = _END_OF_VALUE.search(body, value) if value else None
        if closing is None:
            break
        found[body[opening.end() : value - 1]] = body[value : closing.start()]
        end = closing.end() if closing[0].endswith(">") else closing.start()
    return found


def _json_calls(text: str, tools: Sequence[Mapping[str, Any]], is_cut: bool) -> tuple[str, tuple[ToolCall, ...]]:
    """Read `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`; one that is wrong makes all of them text."""
    calls: list[ToolCall] = []
    first = start = text.find("<tool_call>")
    while start >= 0:
        closing = text.find("</tool_call>", start)
        if is_cut and closing < 0:
            raise ValueError("a call that was cut")
        end = len(text) if closing < 0 else closing
        calls.append(_json_call(text[start + len("<tool_call>") : end]))
        start = text.find("<tool_call>", end)
    before = text[: max(first, 0)]
    return before if before.strip() else "", tuple(calls)


def _json_call(body: str) -> ToolCall:
    call = json.loads(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call needs a name")
    if not isinstance(call.get("arguments"), dict):
        raise ValueError("arguments must be an object")
    arguments = json.dumps(call["arguments"], ensure_ascii=False, allow_nan=False)  # such a number is none of JSON
    return ToolCall(name=call["name"], arguments=arguments)


NOTATIONS: Mapping[str, Callable[[str, Sequence[Mapping[str, Any]], bool], tuple[str, tuple[ToolCall, ...]]]] = {
    "qwen3_coder": _xml_calls,
    "hermes": _json_calls,
}  # vLLM's name of a parser -> how its calls are read


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
