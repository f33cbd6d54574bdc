"""What cannot be prepared is named before anything is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.data.prepare import main, sample


@pytest.mark.parametrize("files", ["{a.jsonl: {}, b.jsonl: {}}", "{a.parquet: {}}"])
def test_a_blend_has_one_file_of_rows(tmp_path: Path, files: str, capsys: pytest.CaptureFixture[str]) -> None:
    blends = tmp_path / "blends.yaml"
    blends.write_text(
        f"datasets: {{o/d: {{revision: {'a' * 40}, blends: {{x: {{files: {files}}}}}}}}}\n", encoding="utf-8"
    )
    data = tmp_path / "data"
    assert main(["--blend", "x", "--blends", str(blends), "--data", str(data)]) == 2
    assert "blends.yaml: x.files: got a." in capsys.readouterr().err
    assert not data.exists()


def test_a_sample_is_the_first_rows_and_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "blend-sample2" / "raw" / "rows.jsonl"
    rows.write_bytes(b'{"n": 0}\n{"n": 1}\n{"n": 2}\n')
    for said in ("the first 2 rows", ""):
        assert sample(rows, out, 2).read_bytes() == b'{"n": 0}\n{"n": 1}\n'
        printed = capsys.readouterr().out
        assert said in printed if said else not printed
    rows.write_bytes(b'{"n": 7}\n{"n": 8}\n{"n": 9}\n')
    assert sample(rows, out, 2).read_bytes() == b'{"n": 7}\n{"n": 8}\n'
