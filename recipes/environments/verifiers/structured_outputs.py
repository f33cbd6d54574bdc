"""Structured output that must satisfy a JSON schema. Reward 1.0 when it validates, else 0.0.

The answer is the whole text in the row's format (JSON, YAML, XML, TOML or CSV), or the arguments of exactly one
function call. The schema is made strict: every listed property is required and no other is allowed.

Kept from the reference, because rewards depend on it:

* Schemas inside lists (anyOf, oneOf, allOf) stay as they are, and a property that is itself named "properties" is taken
  for a list of properties, which no answer satisfies. With the setting `strict_inside_lists` the first two are made
  strict, too, and properties may have any name.
* The answer is the whole text: one in a fenced block is not in the format. `format` is not checked and `nullable` has
  no effect; NaN is a number, 3.0 a whole one, true is none; of equal keys the last counts.

Parsers of the structured output formats, each to plain JSON values that a schema can be checked against.

XML and CSV carry only text, so their leaves are converted to the type the schema names at their place.
"""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from recipes.environments.contract import (
    NOT_SET,
    Agent,
    OneValue,
    Response,
    Row,
    Verdict,
    Verifier,
    all_text,
    function_calls,
    one_of,
    optional_str,
    require_str,
)

FORMATS = ("json", "yaml", "xml", "toml", "csv")
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def parse(text: str, kind: str, schema: Any) -> Any:
    """Return the values in `text`; raises whatever the format's parser raises."""
    if kind == "json":
        return json.loads(text)
    if kind == "yaml":
        import yaml

        return yaml.safe_load(text)
    if kind == "toml":
        return tomllib.loads(text)
    if kind == "xml":
        import xmltodict

        return _xml_value(xmltodict.parse(text), schema)
    columns = _mapping(_mapping(schema, "items"), "properties")
    rows = list(csv.DictReader(io.StringIO(text)))
    return [{key: _csv_value(value, columns.get(key)) for key, value in row.items()} for row in rows]


def _mapping(schema: Any, key: str) -> Mapping[str, Any]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _types(schema: Any) -> list[str]:
    named = schema.get("type") if isinstance(schema, Mapping) else None
    return [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]


def _typed(text: str, types: list[str]) -> Any:
    """Return the text as the first of the types it can be read as; unchanged when there is none."""
    for name in types:
        try:
            if name == "integer":
                return int(text)
            if name == "number":
                return float(text)
        except ValueError:
            continue
        if name == "boolean" and text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
        if name == "string":
            return text
    return text


def _xml_value(value: Any, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None  # a list of types converts nothing here
    if kind == "array":
        # <tags><tag>a</tag><tag>b</tag></tags> arrives as {"tag": ["a", "b"]}
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value.values()))
        elements = value if isinstance(value, list) else [] if value is None else [value]
        return [_xml_value(element, _mapping(schema, "items")) for element in elements]
    if isinstance(value, dict):
        properties = _mapping(schema, "properties")
        return {key: _xml_value(child, properties.get(key)) for key, child in value.items()}
    if value is None:
        return "" if kind == "string" else None
    return _typed(value, [kind]) if isinstance(value, str) and isinstance(kind, str) else value


def _csv_value(value: Any, schema: Any) -> Any:
    types = _types(schema)
    if value == "" and "null" in types and len(types) > 1:
        return None
    return _typed(value, types) if isinstance(value, str) else value


TEXT, TOOL_CALL = "text", "tool_call"
# Where JSON Schema has further schemas: as a value, by name, in a list.
SCHEMAS = frozenset({"items", "additionalProperties", "contains", "then", "else"})
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTED_SCHEMAS = frozenset({"anyOf", "oneOf", "prefixItems"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """An answer that must match a schema."""

    strict_inside_lists: bool = False
    """make the schemas of anyOf and oneOf strict, too, and allow a property named `properties`"""
    xml_coerce_types: Annotated[bool, OneValue()] = NOT_SET
    """read XML leaves as the numbers and truth values that the schema asks for"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The schema, and where the answer is to be found."""

    schema: str  # JSON text as in the row
    schema_type: str
    response_mode: str
    tool_name: str | None
    tool_payload_key: str | None
    is_strict_in_lists: bool = False


class UnfitAnswer(Exception):  # noqa: N818 (it describes the answer, not a fault of the program)
    """The answer earns nothing; `kind` says why in one word."""

    def __init__(self, kind: str, explanation: str) -> None:
        self.kind = kind
        super().__init__(explanation)


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `schema_str`, `schema_type`, `response_mode`, `tool_name` and `tool_payload_key`."""
    return Task(
        schema=require_str(row, "schema_str"),
        schema_type=one_of("schema_type", row.get("schema_type") or "json", FORMATS),
        response_mode=one_of("response_mode", row.get("response_mode") or TEXT, (TEXT, TOOL_CALL)),
        tool_name=optional_str(row, "tool_name"),
        tool_payload_key=optional_str(row, "tool_payload_key"),
        is_strict_in_lists=settings.strict_inside_lists,
    )


def score(response: Response, task: Task) -> Verdict:
    """Parse the answer and validate it against the strict schema."""
    try:
        read = _from_tool_call if task.response_mode == TOOL_CALL else _from_text
        _validate(*read(response, task))
    except UnfitAnswer as unfit:
        reason = f"{unfit.kind}: {unfit}"[:200]
        return Verdict(reward=0.0, reason=reason, details={"error_type": unfit.kind})
    return Verdict(reward=1.0, reason="satisfies the schema", details={"error_type": None})


def strict_schema(schema: Any) -> Any:
    """Require every listed property and forbid others, in all objects reached through objects.

    Schemas inside lists (anyOf, oneOf, allOf) stay as they are, as in NeMo Gym's verifier.
    """
    if not isinstance(schema, Mapping):
        return schema
    strict = dict(schema)
    if "properties" in strict:
        strict["required"] = list(strict["properties"])
        strict["additionalProperties"] = False
    return {key: strict_schema(value) for key, value in strict.items()}


def strict_schema_in_lists(schema: Any) -> Any:
    """Do so in every schema inside a schema, but not where a stricter one allows more (not, if) or nothing (allOf)."""
    if not isinstance(schema, Mapping):
        return schema
    strict = dict(schema)
    for key in SCHEMAS & strict.keys():
        strict[key] = strict_schema_in_lists(strict[key])
    for key in NAMED_SCHEMAS & strict.keys():
        if isinstance(strict[key], Mapping):
            strict[key] = {name: strict_schema_in_lists(inner) for name, inner in strict[key].items()}
    for key in LISTED_SCHEMAS & strict.keys():
        if isinstance(strict[key], list):
            strict[key] = [strict_schema_in_lists(inner) for inner in strict[key]]
    if isinstance(strict.get("properties"), Mapping):
        strict |= {"required": list(strict["properties"]), "additionalProperties": False}
    return strict


def _schema(task: Task) -> Any:
    try:
        return (strict_schema_in_lists if task.is_strict_in_lists else strict_schema)(json.loads(task.schema))
    except Exception as error:  # the row's schema text is data
        raise UnfitAnswer("schema_error", f"the row's schema cannot be read: {error}") from error


def _from_text(response: Response, task: Task) -> tuple[Any, Any]:
    text = all_text(response)
    if not text.strip():
        raise UnfitAnswer("empty_response", "the answer is empty")
    schema = _schema(task)
    try:
        return parse(text, task.schema_type, schema), schema
    except Exception as error:  # model text: whatever a parser raises means it is not in the format
        raise UnfitAnswer("parse_error", f"not {task.schema_type}: {type(error).__name__}: {error}") from error


def _from_tool_call(response: Response, task: Task) -> tuple[Any, Any]:
    if response.get("error") is not None:
        raise UnfitAnswer("api_error", f"the model call failed: {response['error']}")
    calls = function_calls(response)
    if len(calls) != 1:
        kind = "multiple_tool_calls" if calls else "missing_tool_call"
        raise UnfitAnswer(kind, f"{len(calls)} function calls, expected exactly one")
    if task.tool_name and calls[0].get("name") != task.tool_name:
        raise UnfitAnswer("wrong_tool_name", f"called {calls[0].get('name')}, expected {task.tool_name}")
    try:
        payload = json.loads(calls[0].get("arguments", ""))
    except Exception as error:  # model text
        raise UnfitAnswer("tool_arguments_parse_error", f"the arguments are not JSON: {error}") from error
    if task.tool_payload_key:
        if not isinstance(payload, dict) or task.tool_payload_key not in payload:
            raise UnfitAnswer("missing_tool_payload_key", f"the arguments have no '{task.tool_payload_key}'")
        payload = payload[task.tool_payload_key]
    return payload, _schema(task)


def _validate(value: Any, schema: Any) -> None:
    from openapi_schema_validator import validate

    try:
        validate(value, schema)
    except Exception as error:  # jsonschema raises many kinds, also for an unusable schema
        message = getattr(error, "message", None) or str(error)
        raise UnfitAnswer("validation_error", message.splitlines()[0] if message else type(error).__name__) from error


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    agents={
        f"structured_outputs{version}_simple_agent": Agent(kind="single_turn", server="structured_outputs")
        for version in ("", "_v3", "_v4")
    },
    settings=Settings,
    imports=("openapi_schema_validator", "yaml", "xmltodict"),
)
