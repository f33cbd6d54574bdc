"""A snapshot holds the tracked files as they are, is named by its content, and is never written again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.launch.snapshot import Code, read_code, snapshot_path, write_snapshot


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "package").mkdir(parents=True)
    (root / "package" / "a.py").write_text("one\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t.example"]
        subprocess.run(["git", "-C", str(root), *identity, *command], check=True)
    return root


def take(root: Path, home: Path) -> Path:
    code = read_code(root)
    target = snapshot_path(home, code, reuse_newest=False)
    write_snapshot(root, target, code)
    return target


def test_holds_exactly_the_tracked_files_with_their_changes(checkout, tmp_path):
    (checkout / "untracked").write_text("not copied")
    (checkout / "package" / "a.py").write_text("two\n")
    target = take(checkout, tmp_path / "snapshots")
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == {"package/a.py", "run.sh", "COMMIT", "DIFF"}
    assert (target / "package" / "a.py").read_text() == "two\n"
    assert (target / "run.sh").stat().st_mode & 0o111
    assert (target / "COMMIT").read_text().strip() == read_code(checkout).commit
    assert "+two" in (target / "DIFF").read_text()


def test_changed_code_gets_another_directory(checkout, tmp_path):
    first = take(checkout, tmp_path / "snapshots")
    assert first.name.endswith("-clean")
    (checkout / "package" / "a.py").write_text("two\n")
    second = take(checkout, tmp_path / "snapshots")
    assert first != second
    assert (first / "package" / "a.py").read_text() == "one\n"


def test_existing_snapshot_stays_untouched(checkout, tmp_path):
    first = take(checkout, tmp_path / "snapshots")
    (first / "package" / "a.py").write_text("in use")
    assert take(checkout, tmp_path / "snapshots") == first
    assert (first / "package" / "a.py").read_text() == "in use"
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # no partial copy is left


def test_deleted_file_is_left_out(checkout, tmp_path):
    (checkout / "run.sh").unlink()
    assert not (take(checkout, tmp_path / "snapshots") / "run.sh").exists()


def test_newest_snapshot_is_reused_on_request(checkout, tmp_path):
    home = tmp_path / "snapshots"
    code = Code(commit="f" * 40, diff="")
    assert snapshot_path(home, code, reuse_newest=True) == home / f"{'f' * 12}-clean"
    first = take(checkout, home)
    assert snapshot_path(home, code, reuse_newest=True) == first
