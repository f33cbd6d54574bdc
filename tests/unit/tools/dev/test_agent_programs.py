"""Agent programs: installed once, one at a time, with the Python that they need."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from recipes.environments.agents.coding.programs import PROGRAMS
from tools.dev import agent_programs
from tools.locks import only_one


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_PROGRAMS_DIR", str(tmp_path))
    return tmp_path


def test_of_two_installations_at_once_one_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with only_one(place / ".openhands-ai.lock"):
        assert agent_programs.main(["openhands-ai"]) == 2
    assert "another process holds this lock" in capsys.readouterr().err
    assert not (place / "openhands-ai").exists()


def test_what_is_installed_is_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_programs, "run_pip", lambda words: pytest.fail(f"it ran {words}"))
    program = PROGRAMS["mini-swe-agent"]
    program.python.parent.mkdir(parents=True)
    program.python.write_text("", encoding="utf-8")
    wanted = hashlib.sha256(program.adapter.with_suffix(".txt").read_bytes()).hexdigest()
    (place / "mini-swe-agent/.installed").write_text(wanted, encoding="utf-8")
    assert agent_programs.main(["mini-swe-agent"]) == 0
    assert program.python.exists()


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_another_python_than_the_program_needs_is_refused(
    python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_PYTHON", python)
    assert agent_programs.main(["openhands-ai"]) == 2
    said = capsys.readouterr().err
    assert f"openhands-ai needs Python 3.12 with venv; {python} says" in said and "AGENT_PYTHON=" in said


def test_every_program_is_pinned_by_hashes_and_says_how_it_is_installed() -> None:
    for name, program in PROGRAMS.items():
        lines = program.adapter.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert pins and all("==" in pin and "--hash=sha256:" in pin for pin in pins)
        assert f"the agent program {name} is not installed" in program.missing()
        assert f"`make swe-agent AGENT={name}`" in program.missing()
