"""The values of a call's arguments: each has the type that the tool's schema allows, as vLLM's parser gives it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipes.environments.chat.tool_calls import parse_tool_calls

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
    both = "\n".join(function.format(value) for value in ("one", "</function> two"))
    before, calls = parse_tool_calls(f"Hm.<tool_call>\n{both}\n</tool_call>", [tool])
    assert before == "Hm."
    assert [json.loads(call.arguments) for call in calls] == [{"a": "one"}, {"a": "</function> two"}]
    text = f"<tool_call>\n{function.format(1)}\n<function=f>\n</tool_call>"
    assert parse_tool_calls(text, [tool]) == (text, ())
