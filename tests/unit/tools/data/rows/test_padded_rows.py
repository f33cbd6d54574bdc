"""Rows that went through a table, where all objects of one place share their fields, say what the plain rows say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.chat.messages import chat_request
from recipes.environments.contract.rows import schema_without_padding
from recipes.environments.instances import AGENTS, ALL_VERIFIERS, CODING, find_agent, servers_of
from recipes.environments.swe import task
from recipes.environments.verifiers import mcqa
from tests.office import real_office
from tests.unit.tools.data.rows.test_gym_examples import example_files, rows_of
from tools.data.rows.checks import RowChecker, request_key

MORE = {"type": None, "status": None, "id": None, "call_id": None, "name": None, "output": None, "summary": None}


def as_table(values: list[Any]) -> list[Any]:
    """Return values of one place with the fields that a table gives them."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, dict) for value in present):
        keys = list(dict.fromkeys(key for value in present for key in value))
        columns = {key: as_table([value.get(key) for value in present]) for key in keys}
        rows = iter([{key: columns[key][at] for key in keys} for at in range(len(present))])
        return [None if value is None else next(rows) for value in values]
    if present and all(isinstance(value, list) for value in present):
        inner = iter(as_table([element for value in present for element in value]))
        return [None if value is None else [next(inner) for _ in value] for value in values]
    return values


def padded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = as_table(rows)
    for row in made:
        params = row["responses_create_params"]
        params |= {key: params.get(key) for key in ("temperature", "instructions", "tools", "tool_choice", "metadata")}
        if isinstance(params["input"], list):
            params["input"] = [MORE | item for item in params["input"]]
    return made


def test_padded_examples_say_what_the_plain_ones_say(gym_examples_dir: Path) -> None:
    office = {"workplace_assistant": {"resources_servers": {"workplace_assistant": {"tables": real_office()}}}}
    checker, servers = RowChecker.for_tokenizer(None, office), servers_of(office)
    num_compared = 0
    for path in example_files(gym_examples_dir):
        plain = [row for row in rows_of(path) if row["agent_ref"]["name"] in AGENTS and "all_attempts" not in row]
        for one, other in zip(plain, padded(plain), strict=True):
            assert one != other
            assert chat_request(one["responses_create_params"]) == chat_request(other["responses_create_params"])
            found, of_plain = (checker.check(json.dumps(each).encode())[1] for each in (other, one))
            assert found == of_plain, path.name
            assert all("needs a judge" in text for _, text in found), path.name  # none is configured
            agent = find_agent(one["agent_ref"]["name"], checker._agents)
            if agent.kind == CODING:
                assert task.parse_task(one) == task.parse_task(other)
            else:
                server = servers[agent.server]
                parsed = [ALL_VERIFIERS[server.verifier].parse_task(row, server.settings) for row in (one, other)]
                assert parsed[0] == parsed[1], path.name
            num_compared += 1
    assert num_compared > 60


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "enum": None}, "b": None}, "required": None}, None),
        ({"properties": {"a": {"type": "string", "default": None}}}, "same"),
        ({"properties": {"a": {"type": ["string", "null"], "default": None, "items": None}}}, {"default": None}),
        ({"properties": {"a": {"type": "string", "default": None, "items": None}}}, {"default": 0}),
        ({"properties": {"a": {"enum": [1, None], "examples": [{"x": None}], "const": None}}}, "same"),
        ({"properties": {"type": {"anyOf": [{"type": "null"}, {"items": {"type": "string"}}]}}}, "same"),
        ({"properties": {"a": {"items": {"type": "object", "properties": {"x": {"type": "string"}}}}}}, "same"),
        (True, "same"),
        ([None], "same"),
    ],
)
def test_null_goes_where_it_says_nothing(schema: Any, expected: Any) -> None:
    found = schema_without_padding(schema)
    if expected == "same":
        assert found == schema
    elif expected is None:
        assert found == {"type": "object", "properties": {"a": {"type": "string"}}}
    else:
        kept = {"type": schema["properties"]["a"]["type"]} | ({"default": None} if expected["default"] is None else {})
        assert found == {"properties": {"a": kept}}


NESTED = {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}, "anyOf": [{"not": {}}]}


@pytest.mark.parametrize("key", ["items", "additionalProperties", "contains", "not", "if"])
def test_padding_is_found_at_every_depth(key: str) -> None:
    plain = {
        "type": "object",
        "properties": {"a": {key: NESTED}, "b": {"anyOf": [NESTED, NESTED]}},
        "$defs": {"d": NESTED},
    }
    text = json.dumps(plain)
    for empty in ('"type": "number", "enum": null, "description": null', '"type": "number", "properties": null'):
        assert schema_without_padding(json.loads(text.replace('"type": "number"', empty))) == plain


ROW = {"responses_create_params": {"input": "A or B?"}, "agent_ref": {"name": "mcqa_simple_agent"}}
OPTIONS = [{"A": "x", "B": None, "C": None}, {"A": None, "B": "y", "C": None}]
PATTERN = {"template_metadata": {"output_regex": "Final: ([A-D])"}}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"options": OPTIONS, "expected_answer": "B"}, None),
        ({"options": OPTIONS, "expected_answer": "C"}, "'C', not one of A, B"),
        ({"options": OPTIONS, "expected_answer": None}, "'', not one of A, B"),
        ({"options": None, "expected_answer": "A", **PATTERN}, None),
        ({"expected_answer": "d", **PATTERN}, None),
        ({"options": OPTIONS, "expected_answer": "C", **PATTERN}, None),
        ({"options": None, "expected_answer": None, **PATTERN}, "got '', expected one letter"),
        (
            {"options": None, "expected_answer": "A", "template_metadata": {"output_regex": "("}},
            "got nothing, expected a list",
        ),
    ],
)
def test_a_question_that_no_answer_solves_is_named(fields: dict[str, Any], problem: str | None) -> None:
    _, found = RowChecker.for_tokenizer(None).check(json.dumps(ROW | fields).encode())
    assert (problem is None) == (found == [])
    assert problem is None or problem in found[0][1]
    if problem is None and "options" in fields and fields["options"]:
        assert "C" not in mcqa.parse_task(ROW | fields, mcqa.Settings()).letters


def test_a_padded_row_repeats_the_plain_one() -> None:
    plain = {"input": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "parameters": {"type": "object"}}]}
    padded = {
        "input": [{"role": "user", "content": "x", "name": None}],
        "tools": [{"name": "f", "parameters": {"type": "object", "items": None}, "strict": None}],
        "max_output_tokens": None,
    }
    other = {**plain, "max_output_tokens": 5}
    keys = [
        request_key({"agent_ref": {"name": "a"}, "responses_create_params": params})
        for params in (plain, padded, other)
    ]
    assert keys[0] == keys[1] != keys[2]
