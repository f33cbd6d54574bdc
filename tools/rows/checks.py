"""Checks of one row: its shape, its agent, the fields of its verifier, its request, its tools, its length in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.messages import chat_request
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.contract.verifier import Agent
from recipes.environments.environments import Environments
from recipes.environments.instances import ServerInstance, agents_of, servers_of
from recipes.environments.registry import ALL_VERIFIERS, CODING, find_agent
from recipes.environments.swe.task import parse_task
from recipes.grpo.data import check_line as check_shape
from recipes.types import Row

FAILURES = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
)  # what code raises that expects a well-formed row


@dataclass(slots=True)
class RowChecker:
    """Checks rows one by one; with a codec it also counts their tokens.

    `instances` are the servers and agents of a configuration; without them those that verifiers bring read the rows.
    """

    codec: ChatCodec | None
    instances: Mapping[str, Any] = field(default_factory=dict)
    _check_environment: Callable[[Row], list[str]] = field(init=False)
    _agents: Mapping[str, Agent] = field(init=False)
    _known_tools: dict[bytes, str | None] = field(default_factory=dict)  # checked once: many rows share their tools

    def __post_init__(self) -> None:
        servers = servers_of(self.instances)
        self._agents = agents_of(self.instances, servers)
        if self.codec is None:
            self._check_environment = partial(check_without_codec, servers=servers, agents=self._agents)
        else:
            patterns = FlagPatterns(invalid_tool_call=(), thinking_tags=())
            environments = Environments(self.codec, servers=servers, agents=self._agents, patterns=patterns)
            self._check_environment = environments.check_row

    @classmethod
    def for_tokenizer(cls, tokenizer: Path | None, instances: Mapping[str, Any] | None = None) -> RowChecker:
        """Return a checker with the codec of a Hugging Face directory, or without one; raises `ConfigError`."""
        return cls(ChatCodec(tokenizer) if tokenizer else None, instances or {})

    def check(self, line: bytes) -> tuple[Row | None, list[tuple[str, str]]]:
        """Return the row of a line and its problems as (kind, text); None for a line without the shape of a row."""
        if not line.strip():
            return None, [("shape", "an empty line")]
        if wrong := check_shape(line, _nothing):
            return None, [("shape", text) for text in wrong]
        row: Row = orjson.loads(line)
        try:
            found = [("environment", text) for text in self._check_environment(row)]
        except FAILURES as error:
            found = [("environment", f"a row that cannot be read ({type(error).__name__}: {error})")]
        if not found and (text := unrewardable(row, self._agents)):
            found = [("reward", text)]
        return row, found + [("tools", text) for text in self._check_tools(row["responses_create_params"])]

    def num_tokens(self, row: Row) -> int:
        """Return the number of tokens of the first prompt; raises whatever the chat template raises."""
        assert self.codec is not None
        return len(self.codec.encode(row["responses_create_params"]))

    def _check_tools(self, params: Mapping[str, Any]) -> Iterator[str]:
        tools = params.get("tools")
        for position, tool in enumerate(tools if isinstance(tools, list) else ()):
            if not isinstance(tool, Mapping) or "parameters" not in tool:
                continue  # the check of the environment reports a malformed tool
            key = orjson.dumps(tool["parameters"])
            if key not in self._known_tools:
                self._known_tools[key] = schema_problem(tool["parameters"])
            if problem := self._known_tools[key]:
                yield f"tool {position} ({tool.get('name')}): parameters are no JSON Schema of an object: {problem}"


def _nothing(_row: Row) -> list[str]:
    return []


def check_without_codec(row: Row, *, servers: Mapping[str, ServerInstance], agents: Mapping[str, Agent]) -> list[str]:
    """Return what is wrong with a row's request and with the fields of its verifier."""
    problems = []
    try:
        chat_request(row["responses_create_params"])
    except FAILURES as error:
        problems.append(f"responses_create_params: {error}")
    try:
        agent = find_agent(row["agent_ref"]["name"], agents)
        if agent.kind == CODING:
            parse_task(row)
            return problems
        server = servers[agent.server]
        verifier = ALL_VERIFIERS.get(server.verifier)  # none for a type that is known by its URL only
        if verifier is not None:
            verifier.parse_task(row, server.settings)
    except FAILURES as error:
        problems.append(str(error))
    return problems


def unrewardable(row: Row, agents: Mapping[str, Agent]) -> str | None:
    """Return why no answer to a well-typed row can earn a reward, or None; the verifier itself would only give 0."""
    verifier = find_agent(row["agent_ref"]["name"], agents).server
    if verifier == "mcqa":
        letters = sorted(key.strip().upper() for option in row["options"] for key in option)
        answer = str(row.get("expected_answer") or "").strip().upper()
        return (
            None if answer in letters else f"field 'expected_answer': got {answer!r}, not one of {', '.join(letters)}"
        )
    if verifier == "structured_outputs":
        try:
            orjson.loads(row["schema_str"])
        except orjson.JSONDecodeError as error:
            return f"field 'schema_str': got no JSON ({error})"
    return None


def schema_problem(schema: object) -> str | None:
    """Return why `schema` cannot be the parameters of a tool, or None. A schema of null means no parameters."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        return f"got {schema!r}"
    if schema.get("type", "object") != "object":
        return f"type is {schema['type']!r}"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message}"
    return None
