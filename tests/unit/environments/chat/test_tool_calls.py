"""Tool calls of both notations, whole and in parts; the types of arguments are those of the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipes.config.rules.generation import TOOL_PARSERS
from recipes.environments.chat.tool_calls import NOTATIONS, parse_tool_calls

INTEGER_OR_NULL = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
FORMAT = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "str"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5.0", 5),
        ({"type": "number"}, "5.5", 5.5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"b": [1]}', {"b": [1]}),
        ({"type": "dict"}, "{'b': 1}", "{'b': 1}"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        (INTEGER_OR_NULL, "5", 5),
        (INTEGER_OR_NULL, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1", "[1"),
        ({"anyOf": [{"anyOf": [{"type": "boolean"}]}, 3]}, "true", True),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/$defs/A"}, "5", "5"),
        ({}, "5", "5"),
        (None, "5", "5"),
        ({"type": 5, "enum": 3, "anyOf": {}}, "5", "5"),
        ({"type": "any"}, "5", 5),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ],
)
def test_a_value_has_a_type_of_its_schema(schema: Any, text: str, value: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    _, (call,) = parse_tool_calls(FORMAT.format(text), [tool])
    assert call.arguments == json.dumps({"a": value})


def test_functions_between_one_pair_of_tags_are_calls_of_their_own() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    function = "<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>"
    both = "\n".join(function.format(value) for value in ("one", "two"))
    before, calls = parse_tool_calls(f" Hm.\n<tool_call>\n{both}\n</tool_call>", [tool])
    assert before == "Hm."
    assert [json.loads(call.arguments) for call in calls] == [{"a": "one"}, {"a": "two"}]


SEARCH = {"name": "search", "parameters": {"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}}
RIGHT = "<tool_call>\n<function=search>\n<parameter=query>\ncats\n</parameter>\n</function>\n</tool_call>"
LONG = 12345678901234567890123
CATS = ("search", {"query": "cats"})


def read(text: str, **options: Any) -> list[tuple[str, Any]]:
    _, calls = parse_tool_calls(text, [{"type": "function", "function": SEARCH}], **options)
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, [CATS]),
        (RIGHT.replace("</parameter>\n", "<parameter=limit>\n3\n</parameter>\n"), [("search", CATS[1] | {"limit": 3})]),
        (RIGHT.replace("</parameter>\n", ""), [("search", {})]),
        (RIGHT.replace("</function>\n", ""), [CATS]),
        (RIGHT.replace("</tool_call>", ""), [CATS]),
        (RIGHT.replace("<tool_call>\n", ""), [CATS]),
        (RIGHT.replace("<parameter=", "< parameter = ").replace("</p", "< / p"), [CATS]),
        (RIGHT.replace("=search>", "= search >"), [CATS]),
        (RIGHT.replace("<parameter=", "<\u2028parameter\x85=\u00a0").replace("</p", "<\v/\fp"), [CATS]),
        *((RIGHT.replace("<parameter=", f"<{sign}parameter="), [("search", {})]) for sign in "\x1c\x1d\x1e\x1f\u200b"),
        (RIGHT.replace("=query", "=\x1cquery"), [("search", {"\x1cquery": "cats"})]),
        (RIGHT.replace("</parameter", "</\x1fparameter"), [("search", {})]),
        (RIGHT.replace("=query>", ">"), [("search", {})]),
        (RIGHT.replace("=search>", "=>"), []),
        (RIGHT.replace("cats", "a <parameter=limit>3"), [("search", {"query": "a ", "limit": 3})]),
        (RIGHT.replace("cats", "</function>"), [("search", {})]),
        (RIGHT.replace("cats", "</tool_call>"), [("search", {"query": "</tool_call>"})]),
        (RIGHT.replace("cats", "<tool_call>"), [("search", {"query": "<tool_call>"})]),
        (RIGHT.replace("=search>", "=search"), [("search\n<parameter=query", {})]),
        ("<tool_call>\n<function=sea", [("sea", {})]),
        (f"<tool_call>no</tool_call>{RIGHT}", [CATS]),
        (f"{RIGHT}\n<tool_call>\n", [CATS]),
        ("<tool_call>\n</tool_call>", []),
        ('<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>', []),
    ],
)
def test_calls_with_something_missing_are_read_as_the_serving_parser_reads_them(text: str, expected: list[Any]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "search", "arguments": {"query": "cats"}}', [CATS]),
        ('{"name": "search", "arguments": {"limit": 12345678901234567890123}}', [("search", {"limit": LONG})]),
        ('{"name": "search", "arguments": {"limit": NaN}}', []),
        ('{"name": "search", "arguments": {"limit": [-Infinity]}}', []),
        ('{"name": "search", "arguments": "{}"}', []),
        ('{"name": "search"}', []),
        ('{"name": 3, "arguments": {}}', []),
        ('{"name": "search", "arguments": {},}', []),
        ("[]", []),
        ("[" * 5000, []),
        ('{"name": "search", "arguments": {"query": "\\ud800"}}', []),
    ],
)
def test_calls_in_json_are_of_the_other_notation(body: str, expected: list[Any]) -> None:
    text = f"so <tool_call>\n{body}\n</tool_call>"
    assert read(text, notation="hermes") == expected
    assert read(text.removesuffix("\n</tool_call>"), notation="hermes") == expected
    assert read(f"{text}<tool_call>x</tool_call>", notation="hermes") == []
    assert read(text) == []


def test_a_turn_that_was_cut_inside_a_call_has_none() -> None:
    whole = RIGHT + RIGHT
    for end in range(len(whole) + 1):
        is_closed = whole[:end].count("<function") == whole[:end].count("</function>")
        inside = not is_closed or whole[:end].count("<tool_call>") > whole[:end].count("</function>")
        found = read(whole[:end], is_cut=True)
        assert len(found) == (0 if inside else whole[:end].count("</function>")), whole[:end]
    in_json = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    assert read(in_json, notation="hermes", is_cut=True) == [("search", {})]
    assert read(in_json.removesuffix(">"), notation="hermes", is_cut=True) == []


MANY = {
    "qwen3_coder": [
        "<function=f></function>",
        "<function=f>",
        "<function=",
        "<tool_call></tool_call>",
        "<tool_call><function=f><parameter=a>",
        "<function=f><parameter = a>1< / parameter ></function></tool_call>",
        "<function=</think>",
        f"<{' ' * 50}",
    ],
    "hermes": ['<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>{}", "<tool_call>", "</tool_call>"],
}


@pytest.mark.parametrize(("notation", "part"), [(notation, part) for notation, parts in MANY.items() for part in parts])
@pytest.mark.timeout(10)  # read again from each of its parts, a text takes minutes
def test_many_calls_take_linear_time(notation: str, part: str) -> None:
    text = part * (300_000 // len(part))
    for written in (text, f"<tool_call><function=f>{text}</function>", f"<function=f><parameter=a>{text}"):
        read(written, notation=notation)
        read(written, notation=notation, is_cut=True)


def test_the_notations_are_those_that_a_configuration_may_name() -> None:
    assert tuple(NOTATIONS) == TOOL_PARSERS
