"""What tests compare with and this repository does not hold: outputs of the reference implementation, example rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

BESIDE = Path(__file__).resolve().parents[2] / "shared"


def recorded(variable: str, name: str) -> Path:
    """Return the directory that `variable` names, by default `name` below ../shared of the checkout.

    Where there is none, what needs it is skipped; in CI, and when the variable is set, it fails.
    """
    path = Path(os.environ.get(variable, BESIDE / name))
    if not path.is_dir():
        missing = f"{path}: no such directory; set {variable}"
        if variable in os.environ or os.environ.get("CI"):
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing, allow_module_level=True)
    return path


def cases(name: str) -> list[Any]:
    """Return the recorded cases of one file of the algorithm, each under its name."""
    path = recorded("GOLDEN_DIR", "golden") / "grpo" / f"{name}.json"
    return [pytest.param(case, id=case["name"]) for case in json.loads(path.read_text())["cases"]]
