"""Who may import whom. Direct imports are read from the source; what an import drags in is tried in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "ray", "vllm", "megatron", "transformers"}

# Place -> prefixes that no file in it may import, at the top or inside a function.
NEVER = {
    "recipes/policy": ("recipes.generation", "recipes.environments", "recipes.grpo"),
    "recipes/generation": ("recipes.policy", "megatron"),
    "recipes/environments": ("recipes.policy", "recipes.generation", "torch", "ray", "vllm"),
    "recipes/grpo/train.py": ("ray", "vllm", "megatron"),
    "recipes/grpo/advantage.py": ("ray", "vllm", "megatron", "recipes.policy", "recipes.generation"),
    "recipes": ("tools",),
}
# Place -> the only modules of ours and of others, besides the standard library, that it may import.
ONLY = {
    "recipes/grpo/advantage.py": {"torch", "recipes.types"},
    "recipes/grpo/loss.py": {"torch", "recipes.types"},
    "recipes/grpo/reward.py": {"torch", "recipes.types"},
    "recipes/grpo/batch.py": {"torch", "recipes.types"},
}
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


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported(path: Path) -> set[str]:
    """Return every module that a file imports, except for type checkers only."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        pending += [
            child
            for child in ast.iter_child_nodes(node)
            if not (isinstance(child, ast.stmt) and is_type_checking(child))
        ]
    return found


def starts_with(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


@pytest.mark.parametrize(("place", "prefixes"), NEVER.items())
def test_never_imports(place, prefixes):
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files(place)
        for module in imported(path)
        if any(starts_with(module, prefix) for prefix in prefixes)
    ]
    assert files(place)
    assert not wrong


@pytest.mark.parametrize(("place", "allowed"), ONLY.items())
def test_imports_only(place, allowed):
    others = {
        module
        for module in imported(ROOT / place)
        if module.split(".")[0] not in sys.stdlib_module_names
        and not any(starts_with(module, prefix) for prefix in allowed)
        and module != "recipes.grpo"
    }
    assert not others


@pytest.mark.parametrize(("place", "packages"), LIGHT.items())
def test_loads_without(place, packages):
    sources = files(place)
    names = [
        ".".join(source.relative_to(ROOT).with_suffix("").parts)
        for source in sources
        if source.name not in ("__init__.py", "__main__.py") and source.parent.name != "setup"
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
