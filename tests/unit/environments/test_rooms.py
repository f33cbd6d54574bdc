"""The rooms of recipes/environments: each imports only what stands above it, and verifiers are one per file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from recipes.environments.contract.verifier import Verifier
from recipes.environments.instances import VERIFIERS

HOME = Path(__file__).resolve().parents[3] / "recipes" / "environments"
PREFIX = "recipes.environments."
# room -> the rooms it may import from
BELOW: dict[str, set[str]] = {
    "contract": set(),
    "verifiers": {"contract"},
    "sandbox": {"contract"},
    "swe": {"contract", "verifiers", "sandbox"},
    "scoring": {"contract", "sandbox"},
    "chat": {"contract"},
    "agents": {"contract", "scoring", "chat", "swe"},
    "server": {"contract", "sandbox", "scoring", "instances"},
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.removeprefix(PREFIX).split(".")[0] for name in names if name.startswith(PREFIX)}
    return rooms


def test_every_room_is_in_the_table() -> None:
    rooms = {path.name for path in HOME.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == BELOW.keys()
    text = (HOME / "README.md").read_text(encoding="utf-8")
    assert all(f"`{room}/`" in text for room in rooms)


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_what_is_above_it(room: str) -> None:
    for path in (HOME / room).rglob("*.py"):
        assert imported_rooms(path) <= {room, *BELOW[room]}, path.name


@pytest.mark.parametrize("name", VERIFIERS)
def test_one_verifier_per_file_with_its_parts_in_order(name: str) -> None:
    assert isinstance(VERIFIERS[name], Verifier)
    assert VERIFIERS[name].module == f"{PREFIX}verifiers.{name}"
    tree = ast.parse((HOME / "verifiers" / f"{name}.py").read_text(encoding="utf-8"))
    assert "eward" in (ast.get_docstring(tree) or ""), "the docstring says what is rewarded"
    names = [
        node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ast.unparse(node.targets[0])
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)
    ]
    parts = ["Task", "parse_task", "score", "VERIFIER"]
    assert [part for part in names if part in parts] == parts
    assert names[-1] == "VERIFIER"
