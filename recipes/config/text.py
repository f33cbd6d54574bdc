"""A configuration as text: YAML with one line per key and a comment on each, so that it can be read and diffed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

COMMENT_COLUMN = 72
MAX_LINE = 110  # a longer list has an item per line


def scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return str(text).strip().removesuffix("\n...")


def yaml_lines(
    block: Mapping[str, Any], comment_of: Callable[[str], str] | None = None, prefix: str = ""
) -> Iterator[str]:
    """Yield a tree as YAML, one line per key, with what `comment_of` says about each dotted key that has a value."""
    depth = prefix.count(".")
    for name, value in block.items():
        key, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, Mapping) and value:
            if depth == 0:
                yield ""
            yield f"{indent}{name}:"
            yield from yaml_lines(value, comment_of, f"{key}.")
        else:
            comment = "" if comment_of is None else f"  # {comment_of(key)}"
            line = f"{indent}{name}: {scalar(value)}"
            if isinstance(value, list) and len(line) > MAX_LINE:
                yield f"{indent}{name}:{comment}"
                yield from (f"{indent}  - {scalar(item)}" for item in value)
            else:
                yield f"{line:<{COMMENT_COLUMN}}{comment}" if comment else line
