"""What configs/schema.json says about a key: type, range, unit, meaning and what the native engine honours.

The file is written from the classes of recipes/config/tree by `make config-keys`, so that loading a configuration
needs no library that reads them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator

from recipes.errors import Problem

CONFIG_DIR = Path(__file__).resolve().parents[3] / "configs"
UNSET = "???"  # a value that is given at launch
MAX_HOST_NAME = 253  # characters, without a dot at its end
INSTANCES = "env.nemo_gym"  # the block that also holds server instances under free names
SERVER_KINDS = ("resources_servers", "responses_api_models", "responses_api_agents")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyProblem:
    """What is wrong with one key, in one of the two forms of `Problem`, before it is known which file set the key."""

    key: str
    fix: str
    got: str = ""
    expected: str = ""
    wrong: str = ""
    also: tuple[str, ...] = ()  # keys whose values were compared with this one

    def found_in(self, source: str) -> Problem:
        """Return the problem of the file or command line that set the key."""
        where = f"{source}: {self.key}"
        return Problem(where=where, got=self.got, expected=self.expected, wrong=self.wrong, fix=self.fix)


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


def is_http_url(text: str) -> bool:
    """Whether a client can ask there: a scheme of HTTP, a host name that can be looked up, a port if one is given."""
    try:
        place = urlsplit(text)
        labels = (place.hostname or "").removesuffix(".").encode("idna")
        return place.scheme in ("http", "https") and 0 < len(labels) <= MAX_HOST_NAME and place.port != 0
    except ValueError:  # UnicodeError is one, of a label that is empty or too long
        return False


def describe(node: Mapping[str, Any]) -> str:
    """Return what a schema node allows: `an integer >= 1 or null`."""
    if "const" in node:
        return node["const"] if isinstance(node["const"], str) else show(node["const"])
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
    item = node.get("items", {})
    items = ", ".join(item["enum"]) if "enum" in item else "blocks" if item.get("type") == "object" else "texts"
    words["array"] = f"a {'non-empty ' if node.get('minItems') else ''}list of {items}"
    text = " or ".join(words[name] for name in types if name != "null") + _range(node)
    return f"{text} or null" if "null" in types else text


def _range(node: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[name]}" for name, sign in signs.items() if name in node]
    pattern = f" like {node['pattern']}" if "pattern" in node else ""
    return (f" {' and '.join(bounds)}" if bounds else "") + pattern


def settings_of(node: Any) -> dict[str, Any]:
    """Return the declared keys of a schema node, those of its `$ref` included."""
    inherited = settings_of(_referenced(node)) if "$ref" in node else {}
    return {**inherited, **node.get("properties", {})}


def resources_types() -> dict[str, dict[str, Any]]:
    """Return the schema node of every type of resources server: the verifiers."""
    found: dict[str, dict[str, Any]] = schema()["$defs"]["server_instance"]["properties"][SERVER_KINDS[0]]["properties"]
    return found


def server_defaults(tree: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return dotted key -> value and file of each setting that a verifier or an agent takes from its class.

    A verifier at a `url` has defaults of its own.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name, instance in (lookup(tree, INSTANCES) or {}).items():
        for kind in (SERVER_KINDS[0], SERVER_KINDS[2]) if isinstance(instance, Mapping) else ():
            for server, settings in (instance.get(kind) or {}).items():
                node = server_node(f"{INSTANCES}.{name}.{kind}.{server}")
                is_verifier = kind == SERVER_KINDS[0]
                if not (is_verifier and (settings or {}).get("url")):
                    file = f"environments/verifiers/{server}.py" if is_verifier else "config/tree/servers.py"
                    values = _defaults(node, settings or {}, f"{INSTANCES}.{name}.{kind}.{server}")
                    found |= {key: (value, f"recipes/{file}") for key, value in values}
    return found


def _defaults(node: Mapping[str, Any], given: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, child in node.get("properties", {}).items():
        if isinstance(given.get(name), Mapping) and "properties" in child:
            yield from _defaults(child, given[name], f"{above}.{name}")
        elif name not in given and "default" in child:
            yield f"{above}.{name}", child["default"]


def server_node(key: str) -> dict[str, Any]:
    """Return the schema node of a dotted key of a server instance, empty where there is none."""
    names = key.removeprefix(f"{INSTANCES}.").split(".")[1:]
    node: dict[str, Any] = schema()["$defs"]["server_instance"]
    for name in names:
        others = node.get("additionalProperties")
        node = settings_of(node).get(name, others if isinstance(others, Mapping) else {})
    if "$ref" in node:
        node = {**_referenced(node), **node}
    return node if "description" in node and names else {}


def _referenced(node: Mapping[str, Any]) -> dict[str, Any]:
    return dict(schema()["$defs"][node["$ref"].removeprefix("#/$defs/")])


def upwards(key: str) -> Iterator[str]:
    """Yield a dotted key, then each block above it."""
    while key:
        yield key
        key = key.rpartition(".")[0]
