"""A directory made from a GGUF file is there whole or not at all, and not made twice."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from recipes.errors import CheckpointError, RunError
from tools.tiny import from_gguf


class Disk(NamedTuple):
    free: int


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the targets of conversions; nothing is installed, and a conversion writes one file."""
    targets: list[Path] = []

    def write(source: Path, target: Path, packages: Path) -> None:
        del source, packages
        target.mkdir()
        (target / "config.json").write_text("{}", encoding="utf-8")
        targets.append(target)

    monkeypatch.setattr(from_gguf, "install_packages", lambda *_: None)
    monkeypatch.setattr(from_gguf, "_convert_apart", write)
    return targets


def test_it_is_made_once_per_file(tmp_path: Path, made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "model.gguf", tmp_path / "models" / "made"
    call: list[Any] = ["--file", str(file), "--out", str(out), "--packages", str(tmp_path / "packages")]
    for content, times in ((b"one", 1), (b"one", 1), (b"two", 2)):
        file.write_bytes(content)
        assert from_gguf.main(call) == 0
        assert len(made) == times
    assert "is up to date" in capsys.readouterr().out
    (out / from_gguf.METADATA).unlink()  # what has no record is made again
    assert from_gguf.main(call) == 0
    assert len(made) == 3
    assert {path.name for path in out.parent.iterdir()} == {"made"}


@pytest.mark.parametrize("failure", ["no index", "no room", "half a conversion", "no file"])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    out, file = tmp_path / "models" / "made", tmp_path / "model.gguf"
    out.mkdir(parents=True)
    (out / "config.json").write_text("old", encoding="utf-8")
    file.write_bytes(b"one")

    def fail(*words: Any) -> None:
        if failure == "half a conversion":
            words[1].mkdir()
            raise CheckpointError([])
        raise RunError("pip ended")

    if failure == "no index":
        monkeypatch.setattr(from_gguf, "install_packages", fail)
    elif failure == "no room":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(free=1000))
    elif failure == "half a conversion":
        monkeypatch.setattr(from_gguf, "_convert_apart", fail)
    else:
        file.unlink()
    status = from_gguf.main(["--file", str(file), "--out", str(out), "--packages", str(tmp_path / "packages")])
    assert status == (1 if failure == "no index" else 2)
    assert (out / "config.json").read_text(encoding="utf-8") == "old"
    assert {path.name for path in out.parent.iterdir()} == {"made"}
    assert made == []


def test_every_package_is_pinned_by_its_hash() -> None:
    lines = [line for line in from_gguf.REQUIREMENTS.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
