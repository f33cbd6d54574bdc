"""What the tiny scale needs is made only where it can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.tiny.prepare import main


def test_a_machine_without_containers_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    data, models = tmp_path / "data", tmp_path / "models"
    assert main(["--data", str(data), "--models", str(models), "--blend", "wide", "--with-containers"]) == 2
    assert "no program on this machine can run them" in capsys.readouterr().err
    assert not data.exists() and not models.exists()
