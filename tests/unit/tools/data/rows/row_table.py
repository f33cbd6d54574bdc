"""Rows of four agents, and sixty ways to corrupt one with what the check must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

TOOL = {
    "type": "function",
    "name": "get_time",
    "description": "d",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    "strict": True,
}
FIELDS: dict[str, Row] = {
    "math_with_judge_simple_agent": {"question": "What is 1/2?", "expected_answer": "0.5"},
    "mcqa_simple_agent": {"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B", "uuid": "u"},
    "reasoning_gym_simple_agent": {"question": "q", "answer": "12", "metadata": {"source_dataset": "chain_sum"}},
    "structured_outputs_simple_agent": {
        "schema_str": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        "schema_type": "json",
    },
}
MATH, MCQA, GYM, STRUCTURED = FIELDS


def row_of(agent: str, text: str = "What is 1/2?") -> Row:
    """Return a good row."""
    request = {"input": [{"role": "user", "content": text}], "tools": [dict(TOOL)]}
    return {"responses_create_params": request, "agent_ref": {"type": "responses_api_agents", "name": agent}} | FIELDS[
        agent
    ]


def put(*path_and_value: object) -> Callable[[Row], Row]:
    """Return a corruption that sets the value at a path."""
    *path, last, value = path_and_value

    def corrupt(row: Row) -> Row:
        row = json.loads(json.dumps(row))
        place: Any = row
        for step in path:
            place = place[step]
        place[last] = value
        return row

    return corrupt


def without(*path: object) -> Callable[[Row], Row]:
    """Return a corruption that removes what is at a path."""

    def corrupt(row: Row) -> Row:
        row = json.loads(json.dumps(row))
        place: Any = row
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
        return row

    return corrupt


def request(key: str, value: object) -> Callable[[Row], Row]:
    return put("responses_create_params", key, value)


def one_item(item: object) -> Callable[[Row], Row]:
    return request("input", [item])


def tool(**changes: object) -> Callable[[Row], Row]:
    return request("tools", [{**TOOL, **changes}])


def line(content: bytes) -> Callable[[Row], bytes]:
    return lambda _: content


CORRUPTIONS: list[tuple[str, Callable[[Row], Row | bytes], str]] = [
    (MATH, line(b""), "an empty line"),
    (MATH, line(b" \t"), "an empty line"),
    (MATH, line(b"{"), "invalid JSON"),
    (MATH, lambda row: json.dumps(row).encode()[:-20], "invalid JSON"),
    (MATH, lambda row: json.dumps(row).encode() * 2, "invalid JSON"),
    (MATH, lambda row: json.dumps(row).replace("1/2", "\udcff").encode(errors="surrogateescape"), "invalid JSON"),
    (MATH, lambda row: json.dumps(row).replace('"0.5"', "NaN").encode(), "invalid JSON"),
    (MATH, line(b"[]"), "a JSON list instead of an object"),
    (MATH, line(b"3"), "a JSON int instead of an object"),
    (MATH, line(b"null"), "a JSON NoneType instead of an object"),
    (MATH, put("_hf_placeholder", {"row": 1}), "an unfilled `_hf_placeholder`"),
    (MATH, without("responses_create_params"), "no `responses_create_params.input`"),
    (MATH, put("responses_create_params", "x"), "no `responses_create_params.input`"),
    (MATH, without("responses_create_params", "input"), "no `responses_create_params.input`"),
    (MATH, request("input", []), "no `responses_create_params.input`"),
    (MATH, request("input", ""), "no `responses_create_params.input`"),
    (MATH, request("input", {"role": "user"}), "no `responses_create_params.input`"),
    (MATH, without("agent_ref"), "no `agent_ref.name`"),
    (MATH, put("agent_ref", MATH), "no `agent_ref.name`"),
    (MATH, put("agent_ref", "name", 3), "no `agent_ref.name`"),
    (MATH, put("agent_ref", "name", "math_with_judge_simple_agnet"), "did you mean 'math_with_judge_simple_agent'?"),
    (MATH, put("agent_ref", "name", ""), "unknown agent ''"),
    (MATH, put("agent_ref", "name", "swe_pivot_tool_simulation_agent"), "unknown agent"),
    (MATH, one_item("text"), "field 'input': got string 'text'"),
    (MATH, one_item({"content": "x"}), "field 'input'"),
    (MATH, one_item({"role": "robot", "content": "x"}), "field 'input': got string 'robot'"),
    (MATH, one_item({"type": "picture", "role": "user", "content": "x"}), "field 'input': got string 'picture'"),
    (MATH, one_item({"role": "user"}), "field 'content'"),
    (MATH, one_item({"role": "user", "content": 3}), "field 'content': got number 3"),
    (MATH, one_item({"role": "user", "content": None}), "field 'content'"),
    (MATH, one_item({"role": "user", "content": ["x"]}), "field 'content'"),
    (MATH, one_item({"type": "function_call_output", "output": "x"}), "field 'call_id'"),
    (MATH, request("tools", "get_time"), "field 'tools': got string"),
    (MATH, request("tools", {"name": "x"}), "field 'tools': got object"),
    (MATH, request("tools", ["get_time"]), "field 'tools': got string 'get_time'"),
    (MATH, tool(name=""), "field 'tools'"),
    (MATH, tool(type="web_search"), "field 'tools'"),
    (MATH, tool(parameters="{}"), "tool 0 (get_time): parameters are no JSON Schema of an object: got '{}'"),
    (MATH, tool(parameters=[]), "tool 0 (get_time): parameters are no JSON Schema of an object: got []"),
    (MATH, tool(parameters={"type": "string"}), "type is 'string'"),
    (MATH, tool(parameters={"type": "objekt"}), "type is 'objekt'"),
    (MATH, tool(parameters={"properties": {"a": {"type": "int"}}}), "$.properties.a.type: 'int' is not valid"),
    (MATH, tool(parameters={"properties": ["a"]}), "$.properties: ['a'] is not of type 'object'"),
    (MATH, tool(parameters={"required": "a"}), "$.required: 'a' is not of type 'array'"),
    (MATH, tool(parameters={"properties": {"a": {"enum": "b"}}}), "$.properties.a.enum: 'b' is not of type 'array'"),
    (MATH, tool(parameters={"properties": {"a": 3}}), "$.properties.a: 3 is not of type"),
    (MATH, without("expected_answer"), "field 'expected_answer': got nothing"),
    (MATH, put("expected_answer", 42), "field 'expected_answer': got number 42"),
    (MATH, put("expected_answer", None), "field 'expected_answer': got nothing"),
    (MATH, put("question", ["q"]), "field 'question': got list"),
    (MCQA, without("expected_answer"), "field 'expected_answer'"),
    (MCQA, put("expected_answer", "C"), "field 'expected_answer'"),
    (MCQA, put("expected_answer", 1), "field 'expected_answer'"),
    (MCQA, put("options", {"A": "x"}), "field 'options'"),
    (MCQA, put("options", ["x", "y"]), "field 'options'"),
    (GYM, without("metadata"), "field 'metadata"),
    (GYM, put("metadata", "source_dataset", ""), "field 'metadata.source_dataset'"),
    (GYM, put("metadata", "chain_sum"), "field 'metadata'"),
    (STRUCTURED, without("schema_str"), "field 'schema_str': got nothing"),
    (STRUCTURED, put("schema_str", "{"), "field 'schema_str'"),
    (STRUCTURED, put("schema_type", "xlsx"), "field 'schema_type'"),
    (STRUCTURED, put("schema_str", {"type": "object"}), "field 'schema_str': got object"),
]
