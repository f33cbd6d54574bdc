"""`make profile` with something missing: named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.data.curriculum.profile import main


def arguments(place: Path, *more: str) -> list[str]:
    files = ["--model", str(place / "model"), "--data", str(place / "rows.jsonl"), "--run-dir", str(place / "run")]
    return ["--config", "configs/tiny/stage1_rlvr.yaml", *files, *more]


def test_what_is_missing_is_named_and_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path)) == 2
    assert "rows.jsonl: there is no such file" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    assert main(arguments(tmp_path)) == 2
    assert (
        f"--model: {tmp_path}/model is no checkpoint in Hugging Face format: it has no config.json"
        in capsys.readouterr().err
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}", encoding="utf-8")
    assert main(arguments(tmp_path, "grpo.nix=3")) == 2
    assert "grpo.nix: there is no such key" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_no_answers_at_all_measure_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments(tmp_path, "--samples", "0"))
    assert "--samples: got '0', expected a whole number, 1 or more" in capsys.readouterr().err
