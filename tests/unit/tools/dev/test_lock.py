"""The locks: every pin has what it asks for in its lock, or a line says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.dev.lock import PIN, asked_by, conflicts

CONTAINERS = Path(__file__).resolve().parents[4] / "containers"


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_pin_has_what_it_asks_for(name: str) -> None:
    lock = (CONTAINERS / f"requirements-{name}.lock").read_text(encoding="utf-8")
    asked = json.loads((CONTAINERS / f"requirements-{name}.json").read_text(encoding="utf-8"))
    pins = [match[0] for line in lock.splitlines() if (match := PIN.match(line)) and "+" not in match[2]]
    assert sorted(asked) == sorted(pins), f"run: .venv/bin/python -m tools.dev.lock containers/requirements-{name}.lock"
    assert sum(map(len, asked.values())) > len(pins) and not conflicts(lock, asked)


def test_what_is_asked_of_the_target_is_found_with_its_extras() -> None:
    requires = {
        "a==1": ["b[fast]>=2", "c; sys_platform == 'win32'", "d; extra == 'more'", "E_x>1; python_version < '3.12'"],
        "b==2": ["f<3; extra == 'fast'", "g; extra == 'slow'"],
        "f==1": ["a[more]"],
    }
    asked = asked_by(requires)
    assert asked == {"a==1": ["b>=2", "d", "e-x>1"], "b==2": ["f<3"], "f==1": ["a"]}


def test_conflicts_are_named_unless_a_line_accepts_them() -> None:
    asked = {"a==1": ["b>=2", "d"], "b==1": [], "f==1": ["a<=1"]}
    lock = "a==1 --hash=sha256:0\nb==1 --hash=sha256:0\nf==1  # source\n"
    assert conflicts(lock, asked) == ["a asks for b>=2", "a asks for d"]
    lock += "# accepted: a asks for b>=2: only its tests import it\n# accepted: f asks for z: no longer\n"
    assert conflicts(lock, asked) == ["a asks for d", "accepted without need: f asks for z"]
