"""What cannot be prepared is named before anything is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.data.prepare import main


@pytest.mark.parametrize("files", ["{a.jsonl: {}, b.jsonl: {}}", "{a.parquet: {}}"])
def test_a_blend_has_one_file_of_rows(tmp_path: Path, files: str, capsys: pytest.CaptureFixture[str]) -> None:
    blends = tmp_path / "blends.yaml"
    blends.write_text(f"datasets: {{o/d: {{revision: {'a' * 40}, blends: {{x: {{files: {files}}}}}}}}}\n")
    data = tmp_path / "data"
    assert main(["--blend", "x", "--blends", str(blends), "--data", str(data)]) == 2
    assert "blends.yaml: x.files: got a." in capsys.readouterr().err
    assert not data.exists()
