"""Who may import whom among the folders of tools: each stands on those below it, also for type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# From the ground up. A folder that is not listed is a tool of its own, on which none of these stands.
ORDER = (
    *("processes", "command_line", "files", "report", "images", "planning", "job", "nemo_rl", "data", "rows"),
    *("curriculum", "lineage", "tiny", "sizing", "bench", "sif", "doctor", "launch"),
)
FILES = sorted((ROOT / "tools").rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """Return the modules of tools that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= submodules or {node.module}
    return found & MODULES.keys()


@pytest.mark.parametrize("folder", [name for name in ORDER if (ROOT / "tools" / name).is_dir()])
def test_a_folder_stands_on_those_below_it(folder):
    below = ORDER[: ORDER.index(folder)]
    above = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sorted((ROOT / "tools" / folder).rglob("*.py"))
        for module in imported(path)
        if module.split(".")[1] in ORDER and module.split(".")[1] not in (*below, folder)
    ]
    assert not above


def test_no_file_imports_itself_through_others():
    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            for module in imported(MODULES[pending.pop()]) - seen:
                seen.add(module)
                pending.append(module)
        return seen

    assert [name for name in MODULES if name in reached(name)] == []
