"""Parsers of the structured output formats, each to plain JSON values that a schema can be checked against.

XML and CSV carry only text, so their leaves are converted to the type the schema names at their place.
"""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Mapping
from typing import Any

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
