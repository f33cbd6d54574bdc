"""configs/schema.json from the classes of recipes/config/tree and the hand-written settings of servers.

pydantic makes the JSON Schema (draft 2020-12) of each class. What differs here from its usual form: every block stands
where its key stands, so that a reader and an editor find it there; "or null" is one more type of the same entry; every
key is required and no other is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from recipes.config.keys.schema import CONFIG_DIR
from recipes.config.tree import Config

SERVERS = CONFIG_DIR / "environments" / "servers.json"  # settings of each type of server, by hand
DIALECT = "https://json-schema.org/draft/2020-12/schema"
MEANING = (
    "Written by `make config-keys` from recipes/config/tree and configs/environments/servers.json; do not edit. "
    "x-unit: what a number counts. x-native: the values that the native engine honours and why it refuses others, or "
    "why no value has an effect."
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
    servers = json.loads(SERVERS.read_text(encoding="utf-8"))
    head = {"$schema": DIALECT, "title": "Configuration of one stage", "description": MEANING}
    return {**head, **{name: keys[name] for name in keys if name != "description"}, "$defs": servers}


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
