"""Write what follows from the classes of recipes/config/tree: configs/schema.json, the comments of grpo_base.yaml.

    python -m tools.dev.keys

Values of configs/grpo_base.yaml stay as they are, and so do its other comments. The comment of a key stands behind it
or, where that line would be too long, above it after the name of the key.

configs/schema.json from the classes of recipes/config/tree and the settings of verifiers.

pydantic makes the JSON Schema (draft 2020-12) of each class. What differs here from its usual form: every block stands
where its key stands, so that a reader and an editor find it there; "or null" is one more type of the same entry; every
key is required and no other is allowed.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from recipes.config.keys.derive import AGENTS, MODELS, RESOURCES
from recipes.config.keys.schema import CONFIG_DIR, describe
from recipes.config.load import BASE
from recipes.config.merge import display_name, leaves
from recipes.config.tree import Config
from recipes.config.tree.servers import (
    AGENT_TYPES,
    MODEL_TYPES,
    AnyModelServer,
    AnyServer,
    EngineArguments,
    JudgeSampling,
    ResourcesServer,
    ServerReference,
)
from recipes.environments.instances import ALL_VERIFIERS
from recipes.errors import ConfigError, Problem
from recipes.files import write_atomically
from tools.command_line import exit_status

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MEANING = (
    "Written by `make config-keys` from recipes/config/tree and recipes/environments/verifiers; do not edit. x-unit: "
    "what a number counts. x-native: the values that the native engine honours and why it refuses others, why no value "
    "has an effect, or that it has the default alone."
)


class BlockSchema(GenerateJsonSchema):
    """pydantic's writer without titles, with null as one more type."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: the title of a field would repeat its name."""
        return False

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        """Return the entry of `X | None`: that of X, whose types and choices then include null."""
        inner = self.generate_inner(schema["schema"])
        null = {"enum": [*inner["enum"], None]} if "enum" in inner else {}
        return {**inner, "type": [inner["type"], "null"], **null}


def schema_of_keys() -> dict[str, Any]:
    """Return the whole schema as plain data."""
    made = TypeAdapter(Config).json_schema(schema_generator=BlockSchema)
    keys = _inlined({name: entry for name, entry in made.items() if name != "$defs"}, made["$defs"])
    head = {"$schema": DIALECT, "title": "Configuration of one stage", "description": MEANING}
    return {**head, **{name: keys[name] for name in keys if name != "description"}, "$defs": server_definitions()}


SHARED: Mapping[str, type] = {  # entries of `$defs` that servers share
    "any_server": AnyServer,
    "resources_server": ResourcesServer,
    "model_server": AnyModelServer,
    "server_reference": ServerReference,
    "judge_sampling": JudgeSampling,
    "engine_arguments": EngineArguments,
}
OTHERS = {
    "server_references": {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"$ref": "#/$defs/server_reference"},
    },
    "other_resources_server": {
        "description": "A server of a type that this project does not know: it checks rows and gives verdicts itself.",
        "type": "object",
        "$ref": "#/$defs/resources_server",
        "unevaluatedProperties": False,
        "required": ["url"],
    },
}
KINDS = {
    AGENTS: "agents: they run a rollout",
    MODELS: "model servers: policy and judges",
    RESOURCES: "verifiers and tools",
}


def server_definitions() -> dict[str, Any]:
    """Return `$defs`: the server instance with every type of server, and what these share."""
    verifiers = {name: own.settings for name, own in ALL_VERIFIERS.items()}
    types = {AGENTS: AGENT_TYPES, MODELS: MODEL_TYPES, RESOURCES: verifiers}
    entries = _entries_of([*SHARED.values(), *(own for named in types.values() for own in named.values())])
    one = {"type": "object", "additionalProperties": False, "minProperties": 1}
    kinds = {
        kind: {"description": meaning, **one, "maxProperties": 1, "properties": _types(types[kind], entries)}
        for kind, meaning in KINDS.items()
    }
    kinds[RESOURCES]["additionalProperties"] = {"$ref": "#/$defs/other_resources_server"}
    copied = {"description": "name of the instance whose settings these replace", "type": "string", "minLength": 1}
    meaning = "One server of NeMo Gym: exactly one kind, holding one server type with its settings."
    instance = {"description": meaning, **one, "properties": {"_copy": copied, **kinds}}
    return {"server_instance": instance, **_shared(entries), **OTHERS}


def _entries_of(classes: Sequence[type]) -> dict[type, dict[str, Any]]:
    """Return the entry of each class, its inherited fields first."""
    wanted = list(dict.fromkeys(base for own in classes for base in own.__mro__[:-1]))
    names = {f"class_{number}": own for number, own in enumerate(wanted)}
    table = make_dataclass("Servers", names.items(), namespace={"__pydantic_config__": Config.__pydantic_config__})
    made = TypeAdapter(table).json_schema(schema_generator=BlockSchema)
    found = {names[name]: _settings(entry, made["$defs"]) for name, entry in made["properties"].items()}
    for own in wanted:  # pydantic reads the text below an inherited field in the class that declares it alone
        for base in own.__mro__[1:-1]:
            for key, entry in found[base]["properties"].items():
                meaning = {name: entry[name] for name in ("description",) if name in entry}
                found[own]["properties"][key] = {**meaning, **found[own]["properties"][key]}
    problems = [problem for own, entry in found.items() for problem in _undescribed(own, entry)]
    if problems:
        raise ConfigError(problems)
    return found


def _undescribed(own: type, entry: Mapping[str, Any]) -> Iterator[Problem]:
    where = f"{own.__module__}.{own.__name__}"
    if "description" not in entry:
        yield Problem(where=where, wrong="it has no docstring", fix="say in one line what the server is")
    for key, child in entry["properties"].items():
        if "description" not in child:
            fix = "write what it means as a text below the field"
            yield Problem(where=f"{where}.{key}", wrong="it has no meaning", fix=fix)


def _types(classes: Mapping[str, type], entries: Mapping[type, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of each type of server: its own settings, over those of the class that it is one of."""
    shared, found = {own: name for name, own in SHARED.items()}, {}
    for name, own in classes.items():
        above = next((base for base in own.__mro__[1:] if base in shared), ResourcesServer)
        inherited = entries[above]["properties"] if above in own.__mro__ else {}
        properties = {key: entry for key, entry in entries[own]["properties"].items() if key not in inherited}
        head = {"type": "object", "$ref": f"#/$defs/{shared[above]}", "unevaluatedProperties": False}
        found[name] = {"description": entries[own]["description"], **head, "properties": properties}
    return found


def _shared(entries: Mapping[type, Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, own in SHARED.items():
        entry = {key: value for key, value in entries[own].items() if key != "description"}
        above = next((other for other, base in SHARED.items() if base in own.__mro__[1:]), None)
        if name.endswith("_server"):  # a part of a server, which closes itself
            inherited = entries[SHARED[above]]["properties"] if above else {}
            properties = {key: value for key, value in entry["properties"].items() if key not in inherited}
            found[name] = {**({"$ref": f"#/$defs/{above}"} if above else {}), "properties": properties}
        else:
            found[name] = {**entry, "additionalProperties": own is EngineArguments}
    return found


def _settings(entry: Mapping[str, Any], blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a class with defaults: blocks in place, `$ref` for entries of `$defs`, its keys in order."""
    entry = {**blocks[entry["$ref"].removeprefix("#/$defs/")], **entry} if "$ref" in entry else entry
    if "x-entry" in entry:
        meaning = {name: entry[name] for name in ("description",) if name in entry}
        return {**meaning, "$ref": f"#/$defs/{entry['x-entry']}"}
    if "anyOf" in entry:
        choices = {name: value for choice in entry["anyOf"] for name, value in choice.items()}
        types = [choice["type"] for choice in entry["anyOf"]]
        entry = {**choices, **{name: value for name, value in entry.items() if name != "anyOf"}, "type": types}
    if "properties" not in entry:
        has_none = entry.get("default", 0) is None and ("x-native" in entry or "null" not in entry["type"])
        return {name: value for name, value in entry.items() if name != "default" or not has_none}
    keys = {name: child for name, child in entry["properties"].items() if "x-not-a-key" not in child}
    block = {name: value for name, value in entry.items() if name not in ("title", "$ref")}
    closed = {"properties": {name: _settings(child, blocks) for name, child in keys.items()}}
    return {**block, "additionalProperties": False, **closed}


def _inlined(entry: Mapping[str, Any], blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with every block in place of the reference to it, closed to keys that it does not declare."""
    if "$ref" in entry:
        entry = blocks[entry["$ref"].removeprefix("#/$defs/")]
    if "properties" not in entry:
        return dict(entry)
    properties = {name: _inlined(child, blocks) for name, child in entry["properties"].items()}
    further = [name for name, child in properties.items() if "x-further-keys" in child]
    others: Any = {"$ref": f"#/$defs/{properties[further[0]]['x-further-keys']}"} if further else False
    return {
        "description": entry["description"],
        "type": "object",
        "additionalProperties": others,
        "required": [name for name in properties if name not in further],
        "properties": {name: child for name, child in properties.items() if name not in further},
    }


def as_text(schema: Mapping[str, Any]) -> str:
    """Return the schema as the file holds it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


SCHEMA = CONFIG_DIR / "schema.json"
WIDTH = 120
NO_BREAK = "\N{NO-BREAK SPACE}"
KEY_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>(?: (?! ?#).*?)?)(?:  # .*)?")


def generated_files() -> dict[Path, str]:
    """Return the content of both files; raises `ConfigError` where keys and classes differ."""
    schema = schema_of_keys()
    return {SCHEMA: as_text(schema), BASE: commented(BASE.read_text(encoding="utf-8"), schema)}


def commented(text: str, schema: Mapping[str, Any]) -> str:
    """Return the base file with the comment of each key as the schema has it."""
    entries = dict(_entries(schema, ""))
    problems = list(_missing_and_unknown(yaml.safe_load(text), entries))
    if problems:
        raise ConfigError(problems)
    lines: list[str] = []
    blocks: list[tuple[int, str]] = []  # indentation and name of the blocks around a line
    for line in text.splitlines():
        match = KEY_LINE.fullmatch(line)
        if match is None:
            lines.append(line)
            continue
        indent = len(match["indent"])
        blocks = [(depth, name) for depth, name in blocks if depth < indent] + [(indent, match["name"])]
        entry = entries.get(".".join(name for _, name in blocks))
        if entry is None:  # inside a value that is a mapping
            lines.append(line)
        else:
            _remove_comment_above(lines, match)
            lines.extend(_with_comment(match, comment_of(entry)))
    made = "\n".join(lines) + "\n"
    if yaml.safe_load(made) != yaml.safe_load(text):
        raise AssertionError("new comments change a value")
    return made


def comment_of(entry: Mapping[str, Any]) -> str:
    """Return the comment of a key: its meaning, and in brackets what the native engine does not honour."""
    native = entry.get("x-native", {})
    note = ""
    if "no_effect" in native:
        note = " [native: no effect]"
    elif native:
        values = describe(native["honours"]).removeprefix("one of ").replace(", ", " or ")
        note = f" [native: only {values}]"
    return f"{entry['description']}{note}"


def _with_comment(match: re.Match[str], comment: str) -> Iterator[str]:
    """Yield the line of a key with its comment behind it, or above it where there is no room."""
    key = f"{match['indent']}{match['name']}:{match['value'].rstrip()}"
    behind = f"{key}  # {comment}"
    if len(behind) <= WIDTH:
        yield behind
        return
    first, further = f"{match['indent']}# {match['name']}: ", f"{match['indent']}#   "
    meaning, bracket, note = comment.partition(" [native")
    whole = bracket + note.replace(" ", NO_BREAK)  # the note in brackets stays on one line
    for line in textwrap.wrap(meaning + whole, WIDTH, initial_indent=first, subsequent_indent=further):
        yield line.replace(NO_BREAK, " ")
    yield key


def _remove_comment_above(lines: list[str], match: re.Match[str]) -> None:
    """Remove the lines of the comment that an earlier run has put above the key that comes next."""
    start = len(lines)
    while start and lines[start - 1].startswith(f"{match['indent']}#"):
        start -= 1
        if lines[start].startswith(f"{match['indent']}# {match['name']}: "):
            del lines[start:]


def _entries(entry: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, child in entry.get("properties", {}).items():
        yield f"{prefix}{name}", child
        yield from _entries(child, f"{prefix}{name}.")


def _missing_and_unknown(base: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield a problem for each key of the classes without a value in the base file, and for each key of no class."""
    free = [key for key, entry in entries.items() if entry.get("additionalProperties") is True]
    written = {next((name for name in free if key.startswith(f"{name}.")), key) for key in leaves(base)}
    declared = {key for key, entry in entries.items() if "properties" not in entry}
    for key in sorted(declared - written):
        fix = f"add it with its default; it is {describe(entries[key])}"
        yield Problem(where=f"{BASE.name}: {key}", wrong="a key of recipes/config/tree is missing here", fix=fix)
    for key in sorted(written - declared):
        fix = "declare it there, or delete it here"
        yield Problem(where=f"{BASE.name}: {key}", wrong="no class of recipes/config/tree declares this key", fix=fix)


@exit_status
def main() -> int:
    """Write the files that have changed and name them."""
    files = generated_files()
    for path, text in files.items():
        if path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
            print(f"wrote {display_name(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
