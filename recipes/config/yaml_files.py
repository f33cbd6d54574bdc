"""Read YAML files and command-line values as plain data; every trap of YAML 1.1 is a problem that names its key.

YAML 1.1 reads `1e-6` as text, `4:00:00` as 14400, `0755` as 493, `no` as false, and keeps the last of two equal keys.
A value here is what it looks like, or a `Problem`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.errors import Problem

# A reader takes it for a number; YAML 1.1 does so only with a dot and a sign.
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
DECIMAL_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


@dataclass(slots=True)
class Document:
    """One YAML mapping: its data, the line of every dotted key, and what is wrong with it."""

    name: str  # how messages call the file
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # 1-based
    problems: list[Problem] = field(default_factory=list)

    def where(self, key: str) -> str:
        return f"{self.name}: {key}"


def read_yaml(path: Path, *, name: str) -> Document:
    """Read one file; a file that is absent, malformed or no mapping is a problem, not an exception."""
    document = Document(name=name)
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        wrong = f"this file cannot be read ({reason})"
        document.problems.append(Problem(where=name, wrong=wrong, fix="check the path"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        document.problems.append(
            Problem(
                where=f"{name}{line}",
                wrong=f"this is not YAML ({reason})",
                fix="correct the syntax on or above this line",
            )
        )
    else:
        if isinstance(node, yaml.MappingNode):
            try:
                document.data = _mapping(node, "", document)
            except RecursionError:
                fix = "delete the alias"
                document.problems.append(Problem(where=name, wrong="an alias stands inside its own anchor", fix=fix))
        elif node is not None:
            document.problems.append(
                Problem(where=name, wrong="this file has no `key: value` lines", fix="see configs/grpo_base.yaml")
            )
    return document


def parse_value(text: str, *, where: str) -> tuple[Any, list[Problem]]:
    """Read the right side of `key=value` as YAML. Unlike in a file, `1e-6` is a number: nothing else reads it."""
    document = Document(name="command line")
    if EXPONENT.fullmatch(text):
        return float(text), []
    try:
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        return None, [Problem(where=where, wrong=f"{text!r} is not YAML ({reason})", fix="quote it")]
    if node is None:
        fix = "write null for no value, '' for an empty text"
        return None, [Problem(where=where, wrong="there is nothing after '='", fix=fix)]
    value = _value(node, where.removeprefix("command line: "), document)
    return value, document.problems


def _mapping(node: yaml.MappingNode, prefix: str, document: Document) -> dict[str, Any]:
    """Return a mapping as a dict with text keys; a key that stands twice is a problem."""
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "<a key that is no text>"
        key = f"{prefix}.{name}" if prefix else name
        line = key_node.start_mark.line + 1
        if name in data:
            document.problems.append(
                Problem(
                    where=f"{document.name}:{line}: {key}",
                    wrong=f"this key stands here a second time, first on line {document.lines[key]}",
                    fix="delete one of them",
                )
            )
            continue
        document.lines[key] = line
        data[name] = _value(value_node, key, document)
    return data


def _value(node: yaml.Node, key: str, document: Document) -> Any:
    """Return the plain value of a node, recording traps under the dotted `key`."""
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, key, document)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{key}[{index}]", document) for index, item in enumerate(node.value)]
    value, problem = _scalar(node)
    if problem is not None:
        got, expected, fix = problem
        document.problems.append(Problem(where=document.where(key), got=got, expected=expected, fix=fix))
    return value


Trap = tuple[str, str, str]  # what was got, what is expected, the fix


def _scalar(node: yaml.Node) -> tuple[Any, Trap | None]:
    """Return the value of a scalar and, where YAML reads something else than a reader would, the trap."""
    text, kind = str(node.value), node.tag.rsplit(":", 1)[-1]
    if node.style:  # type: ignore[attr-defined]  # quoted or block: text, whatever it looks like
        return text, None
    if kind == "null":
        return None, None
    readers = {"str": _text, "bool": _bool, "int": _int, "float": _float}
    if kind in readers:
        return readers[kind](text)
    return text, (f"{text}, which YAML reads as a {kind}", "a plain value", f'quote it: "{text}"')


def _text(text: str) -> tuple[Any, Trap | None]:
    if EXPONENT.fullmatch(text):
        return float(text), (f"{text}, which YAML reads as text", "a number with a dot", f"write {_with_dot(text)}")
    return text, None


def _bool(text: str) -> tuple[bool, Trap | None]:
    value = text.lower() in ("true", "yes", "on")
    if text.lower() in ("true", "false"):
        return value, None
    word = str(value).lower()
    return value, (f"{text}, which YAML reads as {word}", "true or false", f'write {word}, or quote it: "{text}"')


def _int(text: str) -> tuple[int, Trap | None]:
    if DECIMAL_INT.fullmatch(text):
        return int(text.replace("_", "")), None
    value = int(yaml.safe_load(text))
    return value, (f"{text}, which YAML reads as {value}", "a decimal number", f'write {value}, or quote it: "{text}"')


def _float(text: str) -> tuple[float, Trap | None]:
    value = float(yaml.safe_load(text))
    if ":" in text:
        return value, (f"{text}, which YAML reads as {value}", "a decimal number", f'quote it: "{text}"')
    if not math.isfinite(value):
        return value, (text, "a finite number", "use null where no bound is meant")
    return value, None


def _with_dot(text: str) -> str:
    """Return `1e-6` as `1.0e-6` and `3E5` as `3.0e+5`, which YAML 1.1 reads as numbers."""
    mantissa, exponent = re.split("[eE]", text)
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    exponent = exponent if exponent[0] in "+-" else f"+{exponent}"
    return f"{mantissa}e{exponent}"


def leaves(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the value of every dotted key that is not a block; an empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping) and value:
            flat.update(leaves(value, key))
        else:
            flat[key] = value
    return flat
