"""Packages beside the project's own: installed whole, once per requirements file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipes.errors import RunError
from tools import packages
from tools.packages import install_packages, run_pip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the directories that pip was told to fill; it leaves one file in each."""
    told: list[Path] = []

    def fill(words: list[str]) -> None:
        target = Path(words[words.index("--target") + 1])
        target.mkdir()
        (target / "module.py").touch()
        told.append(target)

    monkeypatch.setattr(packages, "run_pip", fill)
    return told


def test_what_is_there_is_not_installed_again(tmp_path: Path, runs: list[Path]) -> None:
    requirements, place = tmp_path / "requirements.txt", tmp_path / "packages"
    requirements.write_text("one==1 --hash=sha256:0\n", encoding="utf-8")
    install_packages(requirements, place)
    install_packages(requirements, place)
    assert len(runs) == 1 and runs[0] != place and (place / "module.py").exists()
    requirements.write_text("one==2 --hash=sha256:1\n", encoding="utf-8")
    install_packages(requirements, place)
    assert len(runs) == 2


def test_a_failed_installation_leaves_what_was_there(
    tmp_path: Path, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements, place = tmp_path / "requirements.txt", tmp_path / "packages"
    requirements.write_text("one==1 --hash=sha256:0\n", encoding="utf-8")
    install_packages(requirements, place)

    def fail(words: list[str]) -> None:
        Path(words[words.index("--target") + 1]).mkdir()
        raise RunError("pip ended")

    monkeypatch.setattr(packages, "run_pip", fail)
    requirements.write_text("one==2 --hash=sha256:1\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(RunError, match="pip ended"):
            install_packages(requirements, place)
    assert (place / "module.py").exists()


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(RunError, match="ended with status 3; see above"):
        run_pip([sys.executable, "-c", "raise SystemExit(3)"])
