"""Lint every overlay under configs/: a line that repeats its parent, or a key that nothing declares, is an error.

Keep overlays minimal: a line that states what holds without it is a problem, as is a key that nothing declares.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.config import merge
from recipes.config.keys.schema import INSTANCES, lookup, show
from recipes.config.load import load_config
from recipes.config.merge import leaves, read_yaml
from recipes.errors import Problem


def lint_overlay(path: Path) -> list[Problem]:
    """Return what is wrong with an overlay: its load problems, else every line that changes nothing."""
    loaded = load_config(path)
    if loaded.problems:
        return list(loaded.problems)
    chain, _ = merge.read_chain(path)
    *parents, (_, own) = chain
    problems = []
    for key, value in leaves(own.data).items():
        if "~" in key:  # a deletion: one of nothing is a load problem
            continue
        rest = copy.deepcopy(own.data)
        merge.drop(rest, key)
        without = merge.Layers()
        for layer in [*(document.data for _, document in parents), rest]:
            without.add(layer, own.name)
        if key.startswith(INSTANCES):  # its default may stand in a file of server instances
            merge.lay_instances(without, chain[0][0].parent)
        if _value(without.tree, key) == (value if isinstance(value, Mapping) else lookup(loaded.tree, key)):
            where = f"{own.name}:{own.lines[key]}: {key}"
            wrong = f"this line changes nothing: the value is {show(value)} without it"
            problems.append(Problem(where=where, wrong=wrong, fix="delete it"))
    return problems


def _value(tree: Mapping[str, Any], key: str) -> Any:
    """Return the resolved value; resolving the whole tree is slow and only needed for an interpolation."""
    value = lookup(tree, key)
    return lookup(merge.resolve(tree)[0], key) if "${" in str(value) else value


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def main() -> int:
    overlays = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "defaults" in read_yaml(path, name=path.name).data]
    problems = [problem for path in overlays for problem in lint_overlay(path)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or not overlays else 0


if __name__ == "__main__":
    sys.exit(main())
