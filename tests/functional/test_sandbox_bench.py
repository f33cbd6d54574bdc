"""The bench of the sandbox with few programs: both sides run, and are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.sandbox import main

pytestmark = pytest.mark.functional


def test_the_bench_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "bench.json"
    status = main(["--programs", "4", "--rounds", "1", "--out", str(out)])
    printed = capsys.readouterr().out
    assert status == (1 if "BELOW" in printed else 0)
    assert "programs a second" in printed
    assert len(json.loads(out.read_text(encoding="utf-8"))["sandbox"]) == 1


def test_a_machine_without_a_sandbox_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--out", str(tmp_path / "out.json")]) == 1
    assert "no sandbox could be started here" in capsys.readouterr().err
