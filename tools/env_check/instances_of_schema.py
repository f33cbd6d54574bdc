"""A value that satisfies a JSON schema as strict verifiers read it, and its text in a format."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

import yaml

MAX_DEPTH = 40
TEXTS = {
    "date": "2024-01-31",
    "date-time": "2024-01-31T10:00:00Z",
    "email": "a@b.org",
    "time": "10:00:00Z",
    "uri": "https://a.org",
    "uuid": "12345678-1234-1234-1234-123456789abc",
}


def instance_of(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """Return a value that satisfies the common part of JSON Schema: types, enumerations, bounds, references.

    Raises `ValueError` for a schema that refers to itself without end, `KeyError` for a reference to nothing.
    """
    root = schema if root is None else root
    if depth > MAX_DEPTH:
        raise ValueError("the schema refers to itself without end")
    if not isinstance(schema, Mapping):
        return "x"
    if schema.get("enum") or "const" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if (inner := _inner(schema, root)) is not None:
        return instance_of(inner, root, depth + 1)
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        return {key: instance_of(value, root, depth + 1) for key, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance_of(schema.get("items", {}), root, depth + 1)] * max(1, schema.get("minItems", 1))
    return _plain(kind, schema)


def _inner(schema: Mapping[str, Any], root: Any) -> Any:
    """Return the schema that this one refers to or the first that it offers, None where it stands for itself."""
    if "$ref" in schema:
        found = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return found
    return next((schema[name][0] for name in ("anyOf", "oneOf", "allOf") if schema.get(name)), None)


def _plain(kind: str, schema: Mapping[str, Any]) -> Any:
    """Return a value without parts."""
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        most = schema.get("maximum", least)
        number = min(max(least, 1), most) if "minimum" not in schema else least
        return number if kind == "integer" else float(number)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    text = TEXTS.get(str(schema.get("format")), "word")
    text = text.ljust(int(schema.get("minLength", 0)), "x")
    return text[: int(schema["maxLength"])] if "maxLength" in schema else text


def as_text(value: Any, form: str) -> str:
    """Return a value as JSON, YAML, TOML, CSV or XML text; raises `ValueError` for one that the format cannot hold."""
    if form == "yaml":
        return str(yaml.safe_dump(value))
    if form == "toml":
        return _toml(value)
    if form == "csv":
        rows = value if isinstance(value, list) else [value]
        if any(isinstance(part, list | dict) for row in rows for part in row.values()):
            raise ValueError("CSV holds plain values only")
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    if form == "xml":
        import xmltodict

        root = value if isinstance(value, dict) and len(value) == 1 else {"root": value}
        return str(xmltodict.unparse(root))
    return json.dumps(value)


def _toml(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise ValueError("TOML holds an object only")
    return "".join(f"{json.dumps(key)} = {_toml_value(part)}\n" for key, part in value.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value)
