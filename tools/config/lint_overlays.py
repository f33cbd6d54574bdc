"""Lint every overlay under configs/: a line that repeats its parent, or a key that nothing declares, is an error."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.config.lint import lint_overlay
from recipes.config.yaml_files import read_yaml

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def main() -> int:
    overlays = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "defaults" in read_yaml(path, name=path.name).data]
    problems = [problem for path in overlays for problem in lint_overlay(path)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or not overlays else 0


if __name__ == "__main__":
    sys.exit(main())
