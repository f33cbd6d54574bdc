"""Write what follows from the classes of recipes/config/tree: configs/schema.json, the comments of grpo_base.yaml.

    python -m tools.config.keys

Values of configs/grpo_base.yaml stay as they are, and so do its other comments. The comment of a key stands behind it
or, where that line would be too long, above it after the name of the key.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from recipes.config.keys.schema import CONFIG_DIR, describe
from recipes.config.load import BASE
from recipes.config.merge import display_name
from recipes.config.yaml_files import leaves
from recipes.errors import ConfigError, Problem
from recipes.files import write_atomically
from tools.command_line import exit_status
from tools.config.json_schema import as_text, schema_of_keys

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
        note = " [native: no effect yet]"
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
