"""Write configs/schema.json as one Markdown page: every key with type, range, unit, meaning and default.

python -m tools.dev.docs [--write PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.keys.schema import (
    CONFIG_DIR,
    SERVER_KINDS,
    UNSET,
    declared,
    describe,
    lookup,
    schema,
    settings_of,
)
from recipes.config.merge import BASE_NAME, read_yaml, scalar
from tools.command_line import exit_status

INTRODUCTION = """# Configuration reference

Written by `make config-docs` from `configs/schema.json` and `configs/grpo_base.yaml`; do not edit. A stage file holds
only what differs from the default; `make config STAGE=...` prints what a stage resolves to and which file set it.

`native` says what the native engine does with a key that it does not honour in full: it refuses every other value
before a launch, never ignores one. `${...}` is another key, `${mul:a,b}` a product."""
SERVERS = """# Servers of env.nemo_gym

An instance is `NAME: {KIND: {TYPE: {settings}}}`, in a file that `env.nemo_gym.config_paths` lists or beside it. What
the stages use stands in `configs/environments/`; a launch names every server that the native engine has not yet."""
SETTING = ("setting", "allowed", "unit", "default", "meaning")
HEADER = ("key", "allowed", "unit", "default", "meaning", "native")


def page() -> str:
    """Return the page."""
    base = read_yaml(CONFIG_DIR / BASE_NAME, name=BASE_NAME).data
    lines = [INTRODUCTION]
    blocks = {"": schema()} | {key: node for key, node in declared().items() if "properties" in node}
    for key, node in blocks.items():
        rows = list(_rows(key, node, base))
        lines += ["", f"## {key or 'Top level'}", "", str(node["description"]) if key else "Keys outside any block."]
        if rows:
            lines += ["", _line(HEADER), _line(["---"] * len(HEADER)), *map(_line, rows)]
    lines += ["", SERVERS]
    instance = schema()["$defs"]["server_instance"]["properties"]
    for kind in SERVER_KINDS:
        lines += ["", f"## {kind}", "", f"{str(instance[kind]['description']).capitalize()}."]
        others = instance[kind]["additionalProperties"]
        further = {"any other type": schema()["$defs"][others["$ref"].rpartition("/")[2]]} if others else {}
        for server, node in {**instance[kind]["properties"], **further}.items():
            lines += ["", f"### {server}", "", str(node["description"]), "", _line(SETTING)]
            lines += [_line(["---"] * len(SETTING)), *map(_line, _settings(settings_of(node)))]
    return "\n".join(lines) + "\n"


def _settings(nodes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield one row per setting of a server; those inside a setting follow it."""
    for name, node in sorted(nodes.items()):
        inner = settings_of(node)
        if not inner or "description" in node:
            default = f"`{scalar(node['default'])}`" if "default" in node and not inner else ""
            yield f"`{prefix}{name}`", describe(node), node.get("x-unit", ""), default, node["description"]
        yield from _settings(inner, f"{prefix}{name}.")


def _rows(block: str, node: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield one row per key of a block that is no block itself."""
    for name, child in node["properties"].items():
        if "properties" in child:
            continue
        key = f"{block}.{name}" if block else name
        default = lookup(base, key)
        shown = "given at launch" if default == UNSET else f"`{scalar(default)}`"
        unit = child.get("x-unit", "")
        yield f"`{key}`", describe(child), unit, shown, child["description"], native(child)


def native(node: Mapping[str, Any]) -> str:
    """Return what the native engine does with a key: empty when it honours every value."""
    entry = node.get("x-native")
    if entry is None:
        return ""
    if "no_effect" in entry:
        return f"no effect: {entry['no_effect']}"
    return f"only {describe(entry['honours'])}: {entry['reason']}"


def _line(cells: Iterator[str] | tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Print the page or write it."""
    parser = argparse.ArgumentParser(description="Render the configuration reference.")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write it into this file")
    args = parser.parse_args(argv)
    if args.write is None:
        print(page(), end="")
    else:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
