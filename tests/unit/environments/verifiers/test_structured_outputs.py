"""Structured output against a strict schema, as text in five formats and as a function call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.contract.verifier import function_call_item
from recipes.environments.verifiers.structured_outputs import Settings, parse_task, score, strict_schema

Answer = Callable[..., dict[str, Any]]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
TABLE = {"type": "array", "items": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}}}


def error_of(text: str, answer: Answer, schema: Any = SCHEMA, kind: str = "json") -> str | None:
    verdict = score(answer(text), parse_task({"schema_str": json.dumps(schema), "schema_type": kind}, Settings()))
    error = verdict.details["error_type"]
    assert verdict.reward == float(error is None)
    assert verdict.reason.startswith(error or "satisfies")
    return error


def test_correct_and_wrong(answer: Answer) -> None:
    assert error_of('{"name": "Ann", "age": 3}', answer) is None
    assert error_of('{"name": "Ann", "age": "3"}', answer) == "validation_error"
    assert error_of('{"name": "Ann"}', answer) == "validation_error"  # optional in the schema, required here


def test_empty(answer: Answer) -> None:
    assert error_of("", answer) == "empty_response"


@pytest.mark.parametrize("text", ['{"name": "Ann", "age": 3', '```json\n{"name": "Ann", "age": 3}\n```', "Sure! {}"])
def test_malformed(text: str, answer: Answer) -> None:
    assert error_of(text, answer) == "parse_error"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", "[" * 100_000),
        ("yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"),
        ("xml", '<!DOCTYPE x [<!ENTITY e "1">]><name>&e;</name>'),
        ("json", '{"name": "Ann", "age": 3, "name2": "Ann"}'),
        ("yaml", "!!python/object/apply:os.getcwd []"),
    ],
)
def test_adversarial(kind: str, text: str, answer: Answer) -> None:
    assert error_of(text, answer, kind=kind) in ("parse_error", "validation_error")


def test_formats(answer: Answer) -> None:
    root = {"type": "object", "properties": {"root": SCHEMA}}
    assert error_of("name: Ann\nage: 3\n", answer, kind="yaml") is None
    assert error_of('name = "Ann"\nage = 3\n', answer, kind="toml") is None
    assert error_of("<root><name>Ann</name><age>3</age></root>", answer, root, "xml") is None
    assert error_of("<root><name>Ann</name><age>x</age></root>", answer, root, "xml") == "validation_error"
    assert error_of("x\n1\n2\n", answer, TABLE, "csv") is None
    assert error_of("x\nq\n", answer, TABLE, "csv") == "validation_error"
    assert error_of("x,y\n,1\n", answer, TABLE, "csv") == "validation_error"  # a column too many


def test_xml_arrays_come_wrapped_or_repeated(answer: Answer) -> None:
    numbers = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}}}}
    schema = {"type": "object", "properties": {"r": numbers}}
    assert error_of("<r><n>1</n><n>2</n></r>", answer, schema, "xml") is None
    assert error_of("<r><n><i>1</i><i>2</i></n></r>", answer, schema, "xml") is None
    assert error_of("<r><n>1</n><n>b</n></r>", answer, schema, "xml") == "validation_error"


def test_strictness_stops_at_lists() -> None:
    schema = {"properties": {"a": {"properties": {"b": {}}}, "c": {"anyOf": [{"properties": {"d": {}}}]}}}
    strict = strict_schema(schema)
    assert strict["required"] == ["a", "c"]
    assert strict["properties"]["a"] == {"properties": {"b": {}}, "required": ["b"], "additionalProperties": False}
    assert strict["properties"]["c"] == {"anyOf": [{"properties": {"d": {}}}]}


def test_schema_that_cannot_be_used(answer: Answer) -> None:
    verdict = score(answer("{}"), parse_task({"schema_str": "{"}, Settings()))
    assert verdict.details["error_type"] == "schema_error"


def test_tool_call() -> None:
    row = {"schema_str": json.dumps(SCHEMA), "response_mode": "tool_call", "tool_name": "save"}
    task = parse_task(row | {"tool_payload_key": "person"}, Settings())
    good = function_call_item("save", '{"person": {"name": "Ann", "age": 3}}', call_id="c")
    assert score({"output": [good]}, task).reward == 1.0
    cases = {
        "multiple_tool_calls": [good, good],
        "missing_tool_call": [],
        "wrong_tool_name": [function_call_item("load", "{}", call_id="c")],
        "tool_arguments_parse_error": [function_call_item("save", "{", call_id="c")],
        "missing_tool_payload_key": [function_call_item("save", '{"name": "Ann", "age": 3}', call_id="c")],
        "validation_error": [function_call_item("save", '{"person": {}}', call_id="c")],
    }
    for error, output in cases.items():
        assert score({"output": output}, task).details["error_type"] == error
    assert score({"output": [good], "error": {"code": "x"}}, task).details["error_type"] == "api_error"


def instance_of(schema: dict[str, Any]) -> Any:
    """Return a value that satisfies a plain schema, all properties given."""
    kind = schema["type"][0] if isinstance(schema["type"], list) else schema["type"]
    if kind == "object":
        return {key: instance_of(value) for key, value in schema["properties"].items()}
    if kind == "array":
        return [instance_of(schema["items"])]
    return {"string": "x", "integer": 1, "number": 0.5, "boolean": True}[kind]


def test_real_row(gym_row: Callable[..., dict[str, Any]]) -> None:
    row = gym_row("structured_outputs")
    task = parse_task(row, Settings())
    assert (task.response_mode, task.tool_name) == ("tool_call", "response_tool_8")
    payload = instance_of(json.loads(row["schema_str"]))
    wrapped = {task.tool_payload_key: payload} if task.tool_payload_key else payload
    good = function_call_item("response_tool_8", json.dumps(wrapped), call_id="c")
    assert score({"output": [good]}, task).reward == 1.0
    payload.popitem()
    bad = function_call_item("response_tool_8", json.dumps(wrapped), call_id="c")
    assert score({"output": [bad]}, task).details["error_type"] == "validation_error"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "field 'schema_str': got nothing, expected a string"),
        ({"schema_str": {}}, "field 'schema_str': got object {}, expected a string"),
        (
            {"schema_str": "{}", "schema_type": "ini"},
            "field 'schema_type': got string 'ini', expected one of csv, json",
        ),
        ({"schema_str": "{}", "response_mode": "x"}, "field 'response_mode': got string 'x'"),
    ],
)
def test_bad_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        parse_task(row, Settings())
