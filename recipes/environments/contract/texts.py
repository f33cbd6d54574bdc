"""The words that judges are asked in: where the published ones stand, and how they are read from there.

They are data (configs/data/side_files.yaml): `make data` brings each file at a commit, with its hash, and none is kept
in this repository. A text is a whole file, a value of a YAML file, or a string in a Python source: a constant, what a
function returns last, or a name that it sets. A source is parsed, never run. An f-string becomes a template whose
fields have the names of what it shows.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.config.keys.schema import CONFIG_DIR

PUBLISHED, OWN = "published", "own"  # values of env.judge_texts
SIDE_FILES = CONFIG_DIR.parent / "data" / "side_files"
FETCH = "make side-files NAME={side}"


def named_file(value: str) -> Path:
    """Return the file that a setting of a verifier names: a path, or one relative to the checkout that runs."""
    return CONFIG_DIR.parent / value


class TextError(ValueError):
    """A published text that is not there, or not what it was when it was pinned; `fix` says what brings it."""

    def __init__(self, wrong: str, *, side: str) -> None:
        self.wrong, self.fix = wrong, f"fetch it: `{FETCH.format(side=side)}`"
        super().__init__(f"{wrong}; {self.fix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedText:
    """One text: the entry of configs/data/side_files.yaml, its file, and the place in it."""

    side: str
    file: str
    at: str = ""  # dotted: keys of a YAML file, or a name in a Python source; "" = the whole file, stripped

    def read(self) -> str:
        """Return the text; raises `TextError` for a file that is missing or was changed."""
        content = self._content()
        found = _in_file(content, self.file, self.at)
        if found is None:
            raise TextError(f"{self.path} has no text at {self.at}", side=self.side)
        return found

    @property
    def is_pinned(self) -> bool:
        """Whether the file is one that `make data` brings."""
        return self.file in pinned()[self.side]["files"]

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return SIDE_FILES / self.side / self.file

    @property
    def source(self) -> str:
        """Where it was published."""
        entry = pinned()[self.side]
        place = f"{entry['repository']}@{entry['revision'][:7]} {entry['path']}/{self.file}"
        return f"{place} {self.at}".rstrip()

    def _content(self) -> str:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise TextError(f"{self.path} cannot be read ({error.strerror})", side=self.side) from error
        expected = pinned()[self.side]["files"][self.file]["sha256"]
        if (got := hashlib.sha256(content).hexdigest()) != expected:
            wrong = f"{self.path} was changed: got sha256 {got[:12]}..., expected {expected[:12]}..."
            raise TextError(wrong, side=self.side)
        return content.decode()


@functools.cache
def pinned() -> Mapping[str, Any]:
    """Return the table of side files."""
    path = CONFIG_DIR / "data" / "side_files.yaml"
    table: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["side_files"]
    return table


@functools.lru_cache(maxsize=64)
def _in_file(content: str, file: str, at: str) -> str | None:
    if not at:
        return content.strip()
    names = at.split(".")
    if file.endswith(".py"):
        return _named(ast.parse(content).body, names)
    value = yaml.safe_load(content)
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) or value is None else json.dumps(value)


def _named(body: Sequence[ast.stmt], names: Sequence[str]) -> str | None:
    """Return the string that a dotted name has in Python code, None where there is none."""
    name, *rest = names
    for node in body:
        for inner in ast.walk(node) if isinstance(node, ast.If) else (node,):
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and inner.name == name:
                return _named(inner.body, rest) if rest else _returned(inner)
            targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
            if not rest and any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return _string(getattr(inner, "value", None))
    return None


def _returned(function: ast.AST) -> str | None:
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    last = max(returns, key=lambda node: node.lineno, default=None)
    return _string(last.value) if last else None


def _string(node: ast.AST | None) -> str | None:
    """Return a string constant, or an f-string as a template."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value).replace("{", "{{").replace("}", "}}"))
        elif isinstance(part, ast.FormattedValue):
            parts.append("{" + ast.unparse(part.value).rpartition(".")[2] + "}")
    return "".join(parts)
