"""The data bench on small files: every command runs, is timed and is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.data import main

pytestmark = pytest.mark.functional


def test_the_whole_bench_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--large-mb", "1", "--small-mb", "1", "--rounds", "1"]
    status = main([*sizes, "--place", str(tmp_path), "--out", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert status == (1 if "BELOW" in printed else 0)  # so small a file says nothing about speed
    assert "validate, 1 processes" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
