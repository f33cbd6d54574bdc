"""Typed reading of row fields. A wrong field is a `ValueError` that names it, what was got and what is expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

MAX_SHOWN = 60  # characters of a wrong value quoted in a message
# Of an answer's end, what an expression of a row or a setting reads: many take the square of that to find nothing.
EXPRESSION_CHARACTERS = 1 << 13


def shown(value: object) -> str:
    """Return a short form of a value with its JSON type, for messages."""
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:  # orjson reads more levels than Python writes
        text = "that is nested too deep to be shown"
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
    return f"{names.get(type(value), type(value).__name__)} {text}"


def wrong(field: str, value: object, expected: str) -> ValueError:
    """Return the error for a field that has a value it must not have."""
    return ValueError(f"field '{field}': got {shown(value)}, expected {expected}")


def require_str(row: Mapping[str, Any], field: str) -> str:
    """Return a string field that must be there."""
    value = row.get(field)
    if not isinstance(value, str):
        raise wrong(field, value, "a string")
    return value


def optional_str(row: Mapping[str, Any], field: str) -> str | None:
    """Return a string field that may be absent or null."""
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise wrong(field, value, "a string or null")
    return value


def optional_object(row: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return an object field, empty when absent or null."""
    value = row.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(field, value, "an object or null")
    return value


def one_of(field: str, value: object, allowed: Collection[str]) -> str:
    """Return a value that must be one of a few strings."""
    if not isinstance(value, str) or value not in allowed:
        raise wrong(field, value, "one of " + ", ".join(sorted(allowed)))
    return value


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its null fields, where a null field says the same as an absent one.

    Rows that went through a table have them: there all objects of one place share their fields.
    """
    return {key: inner for key, inner in value.items() if inner is not None}


def schema_without_padding(schema: Any) -> Any:
    """Return a JSON Schema without the null fields of a table. Null as a value (`default`, `const`, `enum`) stays.

    Where an object has other null fields, a null `default` or `const` stays only if the schema names the type null.
    """
    if not isinstance(schema, Mapping):
        return schema
    is_padded = any(value is None and key not in _MAY_BE_NULL for key, value in schema.items())
    keeps_null = not is_padded or "null" in (named if isinstance(named := schema.get("type"), list) else [named])
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None:
            if key in _MAY_BE_NULL and keeps_null:
                kept[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            kept[key] = {name: schema_without_padding(inner) for name, inner in value.items() if inner is not None}
        elif key in _SCHEMAS:
            is_list = isinstance(value, list)
            kept[key] = [schema_without_padding(v) for v in value] if is_list else schema_without_padding(value)
        else:
            kept[key] = value
    return kept


_MAY_BE_NULL = frozenset({"default", "const"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties", "unevaluatedProperties"}) | {
    *("unevaluatedItems", "contains", "propertyNames", "not", "if", "then", "else", "anyOf", "oneOf", "allOf"),
}


def last_user_text(row: Mapping[str, Any]) -> str:
    """Return the text of the row's last user message, its parts joined by newlines.

    For a row without messages this is the problem in its metadata; "" where there is nothing to read.
    """
    params = row.get("responses_create_params")
    given = params.get("input") if isinstance(params, Mapping) else None
    if isinstance(given, str):
        return given
    for item in reversed(given if isinstance(given, list) else []):
        if isinstance(item, Mapping) and item.get("role") == "user":
            content = item.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
            return "\n".join(text for text in texts if isinstance(text, str))
    metadata = params.get("metadata") if isinstance(params, Mapping) and not given else None
    problem = metadata.get("problem_statement") if isinstance(metadata, Mapping) else None
    return problem if isinstance(problem, str) else ""
