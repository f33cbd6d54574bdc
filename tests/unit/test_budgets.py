"""Size limits, so that growth is a decision: of files, functions, parameters, and of the train loop."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for package in ("recipes", "tools") for path in (ROOT / package).rglob("*.py"))
SHELL = sorted([*ROOT.glob("*.sh"), *(ROOT / "tools").rglob("*.sh"), *(ROOT / "tools").rglob("*.sbatch")])
TRAIN_LOOP = ROOT / "recipes" / "grpo" / "train.py"  # one function, with limits of its own
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_SHELL = 600, 60, 6, 150
MAX_LOOP_LINES, MAX_LOOP_BRANCHES = 150, 10
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Facts:
    """What the tests look for in one file: each entry is a line number and more."""

    functions: list[tuple[int, int, str, int]]  # first and last line, name, number of parameters
    classes: list[tuple[int, str]]
    prints: list[int]


@functools.cache
def facts(path: Path) -> Facts:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return Facts(
        functions=[
            (node.lineno, node.end_lineno or 0, node.name, num_parameters(node))
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        classes=[(node.lineno, node.name) for node in nodes if isinstance(node, ast.ClassDef)],
        prints=[
            node.lineno
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ],
    )


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def test_fits_in_one_sitting():
    long = [name(path) for path in SOURCES if path.read_text(encoding="utf-8").count("\n") > MAX_FILE]
    assert not long, "split by responsibility, not by line count"
    functions = [
        f"{name(path)}:{first} {function}: {last - first + 1} lines, {parameters} parameters"
        for path in SOURCES
        if path != TRAIN_LOOP
        for first, last, function, parameters in facts(path).functions
        if last - first >= MAX_FUNCTION or parameters > MAX_PARAMETERS
    ]
    assert not functions


@pytest.mark.parametrize("path", SHELL, ids=name)
def test_shell_stays_short(path):
    assert path.read_text(encoding="utf-8").count("\n") <= MAX_SHELL, "move the logic to Python"


def test_names_say_what_is_inside():
    assert not [name(path) for path in SOURCES if path.stem in VAGUE_NAMES]
    classes = [
        f"{name(path)}:{line} {found}"
        for path in SOURCES
        for line, found in facts(path).classes
        if found.endswith(("Manager", "Helper", "Utils"))
    ]
    assert not classes


def test_train_loop_stays_readable():
    source = TRAIN_LOOP.read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_LOOP_LINES
    branches = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If | ast.IfExp | ast.Try)]
    assert len(branches) <= MAX_LOOP_BRANCHES, "push the new case down into the function it belongs to"


def test_no_prints_in_the_package():
    prints = [
        f"{name(path)}:{line}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "recipes") and path.name != "run_grpo.py"
        for line in facts(path).prints
    ]
    assert not prints, "use a logger"
