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

from recipes.grpo.config_upstream import upstream_hint

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
    words["array"] = f"a {'non-empty ' if node.get('minItems') else ''}list of texts"
    text = " or ".join(words[name] for name in types if name != "null") + _range(node)
    return f"{text} or null" if "null" in types else text


def _range(node: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[name]}" for name, sign in signs.items() if name in node]
    pattern = f" like {node['pattern']}" if "pattern" in node else ""
    return (f" {' and '.join(bounds)}" if bounds else "") + pattern


def _findings_of(error: ValidationError) -> Iterator[Finding]:
    key = ".".join(str(part) for part in error.absolute_path)
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
            yield _missing_key(f"{key}.{name}" if key else name)
    else:
        own = next((name for name in _upwards(key) if name in declared()), "")  # of an item of a list, the list
        yield _instance_finding(key, error) if own == INSTANCES != key else _wrong_value(own, error.instance)


def _upwards(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _wrong_value(key: str, value: Any) -> Finding:
    node = declared()[key]
    choices = [str(choice) for choice in node.get("enum", [])]
    close = get_close_matches(str(value), choices, n=1)
    fix = f"did you mean {close[0]}?" if close else f"meaning: {node['description']}"
    return Finding(key=key, got=show(value), expected=describe(node), fix=fix)


def _missing_key(key: str) -> Finding:
    expected = describe(declared()[key])
    return Finding(key=key, got="no value", expected=expected, fix="give it one; null where that is allowed")


def _instance_finding(key: str, error: ValidationError) -> Finding:
    """A further key of env.nemo_gym that is no server instance: most likely a misspelled key."""
    name = key.removeprefix(f"{INSTANCES}.")
    if "." not in name and error.validator == "type":
        return unknown_key(key)
    expected = f"a server instance: a block with {', '.join(SERVER_KINDS)}"
    return Finding(key=key, got=show(error.instance), expected=expected, fix="see configs/environments")


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
