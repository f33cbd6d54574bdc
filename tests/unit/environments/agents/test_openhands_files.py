"""OpenHands' editor works on copies of the container's files: what it reads and writes is the container's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipes.environments.agents.programs.adapters.openhands_ai import MAX_FILE_BYTES, PIECE, Files


class Bash:
    """A container that is this machine."""

    def run(self, command: str, *, seconds: float | None = None, is_lasting: bool = False) -> tuple[int | None, str]:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


class RefusedError(Exception):
    def __init__(self, message: str) -> None:
        self.message = message


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    module = ModuleType("openhands_aci.editor.exceptions")
    monkeypatch.setattr(module, "ToolError", RefusedError, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    container: Any = Bash()
    return Files(container, tmp_path / "copies")


def doing(act: Callable[[Path], Any]) -> Callable[..., Any]:
    """Return an editor that does one thing to the path, and says its name."""

    def editor(*, command: str, path: str) -> Any:
        return SimpleNamespace(error=None, output=f"{command} {path}: {act(Path(path))}")

    return editor


def test_what_the_editor_writes_is_in_the_container(files: Files, tmp_path: Path) -> None:
    path, content = tmp_path / "it's a file", bytes(range(256)) * (PIECE // 128)
    path.write_bytes(content)
    path.chmod(0o755)
    said = files.edit(doing(lambda copy: copy.write_bytes(copy.read_bytes()[::-1])), "insert", str(path))
    assert said == f"insert {path}: {len(content)}"
    assert path.read_bytes() == content[::-1] and path.stat().st_mode & 0o111
    new = tmp_path / "new.py"
    files.edit(doing(lambda copy: copy.write_text("x = 1\n", encoding="utf-8")), "create", str(new))
    assert new.read_text(encoding="utf-8") == "x = 1\n"


def test_what_went_from_the_container_is_not_in_the_copies(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text("x", encoding="utf-8")
    assert files.edit(doing(lambda copy: copy.read_text(encoding="utf-8")), "view", str(path)) == f"view {path}: x"
    path.unlink()
    assert files.edit(doing(lambda copy: copy.exists()), "view", str(path)) == f"view {path}: False"


def test_a_directory_is_shown_by_its_names(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/.hidden").touch()
    (tmp_path / "a/b/x.py").write_text("secret", encoding="utf-8")
    names = doing(lambda copy: sorted(str(found.relative_to(copy)) for found in copy.rglob("*")))
    assert files.edit(names, "view", f"{tmp_path}/a").endswith("['.hidden', 'b', 'b/c', 'b/x.py']")


@pytest.mark.parametrize("path", ["/../../../etc/hostname", "/a/../../../../etc/hostname", "/./../etc/hostname"])
def test_no_copy_lies_outside_their_directory(files: Files, path: str) -> None:
    assert files.local(path).is_relative_to(files.copies)
    assert files.local(path).relative_to(files.copies) == Path("etc/hostname")


def test_what_cannot_be_a_file_is_the_editors_answer(files: Files, tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert files.edit(doing(str), "view", str(large)).startswith(f"ERROR:\n{large} is not a file of at most")
    for path in (f"/{'a' * 5000}", "/a\0b", "/dev/null"):
        assert files.edit(doing(str), "view", path).startswith("ERROR:\n")
    locked = tmp_path / "none/here.py"

    def refuse(copy: Path) -> None:
        raise RefusedError(f"{copy} has no directory")

    assert files.edit(doing(refuse), "create", str(locked)) == f"ERROR:\n{locked} has no directory"
