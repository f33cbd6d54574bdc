"""Who may import whom: rooms stand on floors, and every import between rooms points to a lower floor.

Direct imports are read from the source, those for type checkers included. What an import loads besides is tried in a
fresh process.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "recipes").rglob("*.py")), *sorted((ROOT / "tools").rglob("*.py"))]

# From the ground up. A room imports from floors below its own, never from its own floor or above.
FLOORS = (
    {
        "recipes.errors",
        "recipes.types",
        "recipes.stop",
        "recipes.files",
        "recipes.imports",
        "recipes.retry",
        "recipes.exact_json",
    },
    {
        "recipes.confinement",
        "recipes.tokens",
        "recipes.token_ids",
        "recipes.routes",
        "recipes.checksums",
        "recipes.weight_files",
    },
    {"recipes.cluster"},
    {"recipes.config"},
    {"recipes.environments", "recipes.generation", "recipes.policy", "recipes.sinks"},
    {"recipes.rollouts"},
    {"recipes.grpo"},
    {"recipes.heartbeat"},
    {"recipes.run_grpo"},
    {"tools.processes", "tools.progress"},
    {"tools.command_line", "tools.hub", "tools.json_server", "tools.locks", "tools.packages"},
    {"tools.images"},
    {"tools.draft"},
    {"tools.job", "tools.show_config", "tools.look"},
    {"tools.data", "tools.sizing"},
    {"tools.task_images", "tools.tiny"},
    {"tools.doctor", "tools.environments"},
    {"tools.launch", "tools.bench", "tools.export_hf", "tools.verify_checkpoint"},
    {"tools.dev"},
)
GROUND = FLOORS[0]
MAX_MODULES, MAX_STEPS = 25, 19
MAX_IMPORTS = 22  # of our own modules per 1,000 lines
MAX_TOOL_FOLDERS = 13

HEAVY = {"torch", "ray", "vllm", "megatron", "transformers"}
# Place -> packages that no file in it may import, at the top or inside a function.
NEVER = {
    "recipes/environments": {"torch", "ray", "vllm"},
    "recipes/generation": {"megatron"},
    "recipes/grpo/train.py": {"ray", "vllm", "megatron"},
}
# Place -> the only packages and modules of ours, besides the standard library and itself, that it may import.
ONLY = {
    f"recipes/grpo/{step}.py": {"torch", "recipes.types", "recipes.config.tree"} for step in ("batch", "loss", "reward")
}
# It has the table of algorithms, with the loss of each.
ONLY["recipes/grpo/advantage.py"] = ONLY["recipes/grpo/loss.py"] | {
    *("recipes.grpo.loss", "recipes.grpo.preference", "recipes.config.keys.derive")
}
ONLY["recipes/grpo/preference.py"] = ONLY["recipes/grpo/loss.py"] | {"recipes.grpo.loss"}
# What must load without these packages, directly or through others.
LIGHT = {
    "recipes/environments": {"torch", "ray", "vllm", "megatron"},
    "recipes/config": {"torch", "ray", "vllm", "megatron"},
    "recipes/cluster/ports.py": HEAVY,
    "tools": {"torch", "ray", "vllm", "megatron"},
}


def files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in SOURCES}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


@functools.cache
def imported(path: Path) -> set[str]:
    """Return every module that a file imports, of `from package import name` both where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            found |= names or {node.module}
    return found


def edges() -> Iterator[tuple[str, str]]:
    """Yield (importing, imported) for every import of one module of ours by another."""
    for path in SOURCES:
        for module in imported(path) & MODULES:
            yield module_of(path), module


def test_every_room_has_a_floor():
    rooms = {room_of(module) for module in MODULES if "." in module}
    floors = [room for floor in FLOORS for room in floor]
    assert rooms == set(floors)
    assert len(floors) == len(set(floors))


def test_every_import_between_rooms_points_down():
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    wrong = [
        f"{importing} imports {module}"
        for importing, module in edges()
        if room_of(importing) != room_of(module) and floor_of[room_of(module)] >= floor_of[room_of(importing)]
    ]
    assert not wrong


def folder_of(module: str) -> str:
    """Return the package that a module is in; the modules at the top of `recipes` and `tools` stand for themselves."""
    is_package = (ROOT / Path(*module.split("."))).is_dir()
    parent = module.rpartition(".")[0]
    return module if is_package or "." not in parent else parent


@pytest.mark.parametrize("unit_of", [str, folder_of], ids=["file", "folder"])
def test_no_circle(unit_of):
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for importing, module in edges():
        if unit_of(importing) != unit_of(module):
            graph[unit_of(importing)].add(unit_of(module))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


def test_no_folder_is_a_heap():
    folders: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in SOURCES:
        if path.name != "__init__.py":
            folders[path.parent].append(path)
    assert not {str(folder): len(modules) for folder, modules in folders.items() if len(modules) > MAX_MODULES}
    assert len(folders[ROOT / "recipes" / "grpo"]) <= MAX_STEPS


def test_a_room_is_worth_its_door():
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in SOURCES)
    imports = len(set(edges()))
    assert 1000 * imports / lines <= MAX_IMPORTS, "a module with one importer belongs to it"
    folders = {path.relative_to(ROOT / "tools").parts[0] for path in SOURCES if path.is_relative_to(ROOT / "tools")}
    assert len([folder for folder in folders if not folder.endswith(".py")]) <= MAX_TOOL_FOLDERS


@pytest.mark.parametrize(("place", "packages"), NEVER.items())
def test_never_imports(place, packages):
    wrong = [
        f"{module_of(path)} imports {module}"
        for path in files(place)
        for module in imported(path)
        if module.split(".")[0] in packages
    ]
    assert files(place)
    assert not wrong


@pytest.mark.parametrize(("place", "allowed"), ONLY.items())
def test_imports_only(place, allowed):
    others = {
        module
        for module in imported(ROOT / place)
        if module.split(".")[0] not in sys.stdlib_module_names
        and not any(module == name or module.startswith(f"{name}.") for name in allowed)
    }
    assert not others


@pytest.mark.parametrize(("place", "packages"), LIGHT.items())
def test_loads_without(place, packages):
    names = [
        module_of(source)
        for source in files(place)
        if source.name not in ("__init__.py", "__main__.py") and source.parent.name != "dev"
    ]
    # One process per place, and one module at a time in it, so that the message names the first that is heavy.
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {packages!r} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} loads {heavy}'\n"
    )
    assert names
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr.splitlines()[-1]
