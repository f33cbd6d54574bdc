"""What tests compare with and this repository does not hold: outputs of the reference implementation, example rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

BESIDE = Path(__file__).resolve().parents[2] / "shared"


def recorded(variable: str, name: str) -> Path:
    """Return the directory that `variable` names, by default `name` below ../shared of the checkout.

    Where there is none, what needs it is skipped; when the variable is set, it fails.
    """
    path = Path(os.environ.get(variable, BESIDE / name))
    if not path.is_dir():
        missing = f"{path}: no such directory; set {variable}"
        if variable in os.environ:
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing, allow_module_level=True)
    return path


def cases(name: str) -> list[Any]:
    """Return the recorded cases of one file of the algorithm, each under its name."""
    return _cases(f"grpo/{name}.json", "cases")


def env_cases(name: str, key: str = "cases") -> list[Any]:
    """Return the recorded cases of one file of the environments, each under the file's name and its own."""
    return _cases(f"env/{name}.json", key)


def golden(name: str) -> dict[str, Any]:
    """Return the content of one recorded file, {} where a directory that GOLDEN_DIR names does not have it.

    Another directory of the same form may hold fewer files, or fewer cases. The stored one holds all.
    """
    path = recorded("GOLDEN_DIR", "golden") / name
    if "GOLDEN_DIR" in os.environ and not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def skip_where_missing(found: Any, what: str) -> None:
    """Skip a test for which another directory has nothing; the stored one has something for every test."""
    if not found:
        assert "GOLDEN_DIR" in os.environ, f"there is no {what}"
        pytest.skip(f"GOLDEN_DIR has no {what}")


def env_cases_of(names: Iterable[str]) -> list[Any]:
    """Return the cases of several files of the environments, each behind its file's name."""
    return [
        pytest.param(name, *case.values, id=case.id, marks=case.marks) for name in names for case in env_cases(name)
    ]


def _cases(name: str, key: str) -> list[Any]:
    entries = golden(name).get(key, [])
    if not entries:
        assert "GOLDEN_DIR" in os.environ, f"{name} has no {key}"
        missing = f"GOLDEN_DIR has no {key} in {name}"
        return [pytest.param(None, id=missing, marks=pytest.mark.skip(missing))]
    prefix = f"{Path(name).stem}-" if name.startswith("env/") else ""
    return [pytest.param(entry, id=f"{prefix}{_name(entry, number)}") for number, entry in enumerate(entries)]


def _name(entry: Any, number: int) -> str:
    return str(entry.get("name", number) if isinstance(entry, dict) else number)
