"""Check a resolved configuration against configs/schema.json and say what is wrong in the words of a user.

The schema is the one description of every key: type, range, meaning (`description`) and, under `x-native`, the values
that the native engine honours with the reason why it refuses others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from recipes.config.upstream import upstream_hint

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
UNSET = "???"  # a value that is given at launch
INSTANCES = "env.nemo_gym"  # the block that also holds server instances under free names
SERVER_KINDS = ("resources_servers", "responses_api_models", "responses_api_agents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with one key; `also` names the keys whose values were compared with it."""

    key: str
    got: str
    expected: str
    fix: str
    also: tuple[str, ...] = ()


@functools.cache
def schema() -> dict[str, Any]:
    """Return the parsed schema file."""
    parsed: dict[str, Any] = json.loads((CONFIG_DIR / "schema.json").read_text(encoding="utf-8"))
    return parsed


@functools.cache
def declared() -> dict[str, dict[str, Any]]:
    """Return the schema node of every dotted key, blocks included."""
    return dict(_declared(schema(), ""))


def _declared(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        key = f"{prefix}.{name}" if prefix else name
        yield key, child
        yield from _declared(child, key)


def schema_findings(tree: Mapping[str, Any]) -> list[Finding]:
    """Return one finding per key that is unknown, missing, of the wrong type or out of range; `???` passes."""
    findings = [
        finding for error in Draft202012Validator(schema()).iter_errors(tree) for finding in _findings_of(error)
    ]
    return list({(finding.key, finding.got): finding for finding in findings}.values())


def refused_keys(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield key, value and `x-native` of every value that the native engine does not honour."""
    for key, node in declared().items():
        native = node.get("x-native")
        if native is not None and "honours" in native:
            value = lookup(tree, key)
            if not Draft202012Validator(native["honours"]).is_valid(value):
                yield key, value, native


def lookup(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, None where there is none."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def show(value: Any) -> str:
    """Return a value as YAML would show it on one line, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe(node: Mapping[str, Any]) -> str:
    """Return what a schema node allows: `an integer >= 1 or null`."""
    if "const" in node:
        return show(node["const"])
    if "enum" in node:
        return f"one of {', '.join('null' if value is None else str(value) for value in node['enum'])}"
    types = node.get("type", "object")
    types = [types] if isinstance(types, str) else types
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "a non-empty text" if "minLength" in node else "a text",
        "object": "a block of keys",
    }
    items = "blocks" if node.get("items", {}).get("type") == "object" else "texts"
    words["array"] = f"a {'non-empty ' if node.get('minItems') else ''}list of {items}"
    text = " or ".join(words[name] for name in types if name != "null") + _range(node)
    return f"{text} or null" if "null" in types else text


def _range(node: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[name]}" for name, sign in signs.items() if name in node]
    pattern = f" like {node['pattern']}" if "pattern" in node else ""
    return (f" {' and '.join(bounds)}" if bounds else "") + pattern


def _findings_of(error: ValidationError) -> Iterator[Finding]:
    key = ".".join(str(part) for part in error.absolute_path)
    if key.startswith(f"{INSTANCES}.") and key not in declared() and not _is_below_a_key(key):
        yield from _server_findings(key, error)
        return
    present: Mapping[str, Any] = error.instance if isinstance(error.instance, Mapping) else {}
    rule: Any = error.validator_value
    node: Any = error.schema
    if error.instance == UNSET and key in declared():
        return
    if error.validator == "additionalProperties":
        for name in sorted(set(present) - set(node.get("properties", {}))):
            yield unknown_key(f"{key}.{name}" if key else name)
    elif error.validator == "required":
        for name in sorted(set(rule) - set(present)):
            yield _missing_key(f"{key}.{name}" if key else name, declared()[f"{key}.{name}" if key else name])
    else:
        own = next((name for name in _upwards(key) if name in declared()), "")  # of an item of a list, the list
        yield _wrong_value(own, declared()[own], error.instance)


def _is_below_a_key(key: str) -> bool:
    """Whether this is an item of one of the block's own keys, and no server instance."""
    return any(name in declared() and name != INSTANCES for name in _upwards(key) if name.startswith(f"{INSTANCES}."))


def _upwards(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _wrong_value(key: str, node: Mapping[str, Any], value: Any) -> Finding:
    choices = [str(choice) for choice in node.get("enum", [])]
    close = get_close_matches(str(value), choices, n=1)
    fix = f"did you mean {close[0]}?" if close else f"meaning: {node['description']}"
    return Finding(key=key, got=show(value), expected=describe(node), fix=fix)


def _missing_key(key: str, node: Mapping[str, Any]) -> Finding:
    return Finding(key=key, got="no value", expected=describe(node), fix="give it one; null where that is allowed")


def _server_findings(key: str, error: ValidationError) -> Iterator[Finding]:
    """Yield what is wrong with a further key of env.nemo_gym: a server instance, or a misspelled key of the block."""
    name = key.removeprefix(f"{INSTANCES}.")
    present: Mapping[str, Any] = error.instance if isinstance(error.instance, Mapping) else {}
    known = settings_of(error.schema)
    if error.validator in ("additionalProperties", "unevaluatedProperties"):
        for further in sorted(set(present) - set(known)):
            close = get_close_matches(further, known, n=1)
            fix = (
                f"did you mean {close[0]}?" if close else f"delete it; there are: {', '.join(sorted(known)) or 'none'}"
            )
            expected = ("a kind of server", "a type of server", "a setting of its server")[min(name.count("."), 2)]
            yield Finding(key=f"{key}.{further}", got="a key that nothing reads", expected=expected, fix=fix)
    elif error.validator == "required":
        required: Any = error.validator_value
        for missing in sorted(set(required) - set(present)):
            yield _missing_key(f"{key}.{missing}", known[missing])
    elif error.validator == "type" and "." not in name:
        yield unknown_key(key)
    elif error.validator in ("minProperties", "maxProperties"):
        expected = "one type of server" if "." in name else f"one of {', '.join(SERVER_KINDS)}"
        fix = "an instance is one server; see configs/environments"
        yield Finding(key=key, got=show(sorted(present)), expected=expected, fix=fix)
    else:
        own = next(above for above in _upwards(key) if server_node(above))
        yield _wrong_value(own, server_node(own), error.instance)


def settings_of(node: Any) -> dict[str, Any]:
    """Return the declared keys of a schema node, those of its `$ref` included."""
    inherited = settings_of(_referenced(node)) if "$ref" in node else {}
    return {**inherited, **node.get("properties", {})}


def server_node(key: str) -> dict[str, Any]:
    """Return the schema node of a dotted key of a server instance, empty where there is none."""
    names = key.removeprefix(f"{INSTANCES}.").split(".")[1:]
    node: dict[str, Any] = schema()["$defs"]["server_instance"]
    for name in names:
        node = settings_of(node).get(name, {})
    if "$ref" in node:
        node = {**_referenced(node), **node}
    return node if "description" in node and names else {}


def _referenced(node: Mapping[str, Any]) -> dict[str, Any]:
    return dict(schema()["$defs"][node["$ref"].removeprefix("#/$defs/")])


def unknown_key(key: str) -> Finding:
    """Return the finding for a key that the schema does not declare, with the nearest key that it does."""
    hint = upstream_hint(key)
    if hint is None:
        near = _nearest(key)
        hint = f"did you mean {near}?" if near else "delete it, or declare it in configs/grpo_base.yaml and schema.json"
    return Finding(key=key, got="a key that nothing reads", expected="a key of configs/grpo_base.yaml", fix=hint)


def _nearest(key: str) -> str | None:
    parent, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in declared() if k.rpartition(".")[0] == parent}
    close = get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(declared())}
    close = get_close_matches(name, elsewhere, n=1, cutoff=0.85)
    return elsewhere[close[0]] if close else None
