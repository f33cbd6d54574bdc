"""The parts of a rehearsal that need no process of their own."""

from __future__ import annotations

import json
from pathlib import Path

from tools.dev.rehearse import lock_findings, start_findings
from tools.dev.rehearse_start import BringUp


def test_pins_that_contradict_are_found(tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text("mamba-ssm==2.3.2\ntilelang==0.1.12\n", encoding="utf-8")
    asked = {"mamba-ssm==2.3.2": ["tilelang==0.1.8"], "tilelang==0.1.12": []}
    lock.with_suffix(".json").write_text(json.dumps(asked), encoding="utf-8")
    [found] = lock_findings(lock)
    assert found.code == "IMG006" and "mamba-ssm asks for tilelang==0.1.8" in str(found.problem)
    lock.write_text("mamba-ssm==2.3.2\ntilelang==0.1.8\n", encoding="utf-8")
    assert not list(lock_findings(lock))


def test_a_start_that_ends_otherwise_is_found() -> None:
    right = BringUp(what="all nodes join", expected="goes on with 3", got="goes on with 3", seconds=0.1)
    wrong = BringUp(what="a node never joins", expected="given up because of n2", got="goes on with 2", seconds=0.1)
    [found] = start_findings([right, wrong])
    assert found.code == "ALC005"
    assert "a node never joins: got goes on with 2, expected given up because of n2" in str(found.problem)
