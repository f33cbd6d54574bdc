"""A snapshot holds the tracked files as they are, is named by its content, and is never written again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from recipes.errors import LaunchError
from tools.draft.snapshot import (
    CodeVersion,
    add_side_files,
    read_code,
    read_snapshot,
    snapshot_path,
    untracked,
    write_snapshot,
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "package").mkdir(parents=True)
    (root / "package" / "a.py").write_text("one\n", encoding="utf-8")
    (root / "run.sh").write_text("#!/bin/sh\n", encoding="utf-8")
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
    (checkout / "untracked").write_text("not copied", encoding="utf-8")
    (checkout / "package" / "a.py").write_text("two\n", encoding="utf-8")
    target = take(checkout, tmp_path / "snapshots")
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == {"package/a.py", "run.sh", "COMMIT", "DIFF"}
    assert (target / "package" / "a.py").read_text(encoding="utf-8") == "two\n"
    assert (target / "run.sh").stat().st_mode & 0o111
    assert (target / "COMMIT").read_text(encoding="utf-8").strip() == read_code(checkout).commit
    assert "+two" in (target / "DIFF").read_text(encoding="utf-8")


def test_changed_code_gets_another_directory(checkout, tmp_path):
    first = take(checkout, tmp_path / "snapshots")
    assert first.name.endswith("-clean")
    (checkout / "package" / "a.py").write_text("two\n", encoding="utf-8")
    second = take(checkout, tmp_path / "snapshots")
    assert first != second
    assert (first / "package" / "a.py").read_text(encoding="utf-8") == "one\n"


def test_existing_snapshot_stays_untouched(checkout, tmp_path):
    first = take(checkout, tmp_path / "snapshots")
    (first / "package" / "a.py").write_text("in use", encoding="utf-8")
    assert take(checkout, tmp_path / "snapshots") == first
    assert (first / "package" / "a.py").read_text(encoding="utf-8") == "in use"
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # no partial copy is left


def test_deleted_file_is_left_out(checkout, tmp_path):
    (checkout / "run.sh").unlink()
    assert not (take(checkout, tmp_path / "snapshots") / "run.sh").exists()


def test_newest_snapshot_is_reused_on_request(checkout, tmp_path):
    home = tmp_path / "snapshots"
    code = CodeVersion(commit="f" * 40, diff="")
    assert snapshot_path(home, code, reuse_newest=True) == home / f"{'f' * 12}-clean"
    first = take(checkout, home)
    assert snapshot_path(home, code, reuse_newest=True) == first


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.example", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def test_links_and_files_of_submodules_are_copied(checkout, tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "inside.py").write_text("inside\n", encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "inner"]):
        git(inner, *words)
    (checkout / "here").symlink_to("package")
    (checkout / "nowhere").symlink_to("no such file")
    git(checkout, "submodule", "add", "-q", str(inner), "third_party")
    git(checkout, "add", "-A")
    target = take(checkout, tmp_path / "snapshots")
    assert (target / "here").readlink() == Path("package")
    assert (target / "nowhere").readlink() == Path("no such file")
    assert (target / "third_party" / "inside.py").read_text(encoding="utf-8") == "inside\n"


def test_recorded_diff_gives_the_files_back_whatever_their_bytes_and_the_users_settings(checkout, tmp_path):
    (checkout / "package" / "a.py").write_bytes(b"caf\xe9\r\n\x80")
    git(checkout, "config", "diff.noprefix", "true")
    git(checkout, "config", "color.ui", "always")
    target = take(checkout, tmp_path / "snapshots")
    assert read_snapshot(target) == read_code(checkout)
    again = tmp_path / "again"
    git(
        checkout,
        "worktree",
        "add",
        "-q",
        "--detach",
        str(again),
        (target / "COMMIT").read_text(encoding="utf-8").strip(),
    )
    git(again, "apply", "--binary", str(target / "DIFF"))
    assert (again / "package" / "a.py").read_bytes() == b"caf\xe9\r\n\x80"


def test_files_that_change_while_they_are_copied_leave_no_snapshot(checkout, tmp_path):
    code = read_code(checkout)
    target = snapshot_path(tmp_path / "snapshots", code, reuse_newest=False)
    (checkout / "package" / "a.py").write_text("edited after the plan\n", encoding="utf-8")
    with pytest.raises(LaunchError, match="files changed while they were copied"):
        write_snapshot(checkout, target, code)
    assert list(target.parent.iterdir()) == []


def test_newest_is_the_one_taken_last_not_the_one_written_into(checkout, tmp_path):
    home = tmp_path / "snapshots"
    first = take(checkout, home)
    (checkout / "package" / "a.py").write_text("two\n", encoding="utf-8")
    second = take(checkout, home)
    for age, path in ((200, first), (100, second)):
        os.utime(path / "COMMIT", (10**9 - age, 10**9 - age))
    (first / "__pycache__").mkdir()  # what a running job writes
    (home / ".partial").mkdir()
    (home / "stray").mkdir()
    assert snapshot_path(home, read_code(checkout), reuse_newest=True) == second


def test_untracked_files_of_the_checkout_are_named(checkout, tmp_path):
    (checkout / "mine.yaml").write_text("a: 1\n", encoding="utf-8")
    paths = [checkout / "mine.yaml", checkout / "package" / "a.py", tmp_path / "elsewhere.yaml"]
    assert untracked(checkout, paths) == [checkout / "mine.yaml"]


def test_outside_git_the_message_says_what_to_do(tmp_path):
    assert read_code(tmp_path) == CodeVersion(commit="", diff="")
    with pytest.raises(LaunchError, match="SKIP_CODE_SNAPSHOT=true"):
        write_snapshot(tmp_path, tmp_path / "snapshots" / "x", CodeVersion(commit="", diff=""))


def test_side_files_of_a_snapshot_are_those_of_the_checkout(checkout, tmp_path):
    """The job runs in the snapshot, and its verifiers look for their tables there."""
    target = take(checkout, tmp_path / "snapshots")
    add_side_files(checkout, target)  # none yet
    assert not (target / "data").exists()
    table = Path("data/side_files/office/processed/table.csv")
    (checkout / table).parent.mkdir(parents=True)
    (checkout / table).write_text("one", encoding="utf-8")
    add_side_files(checkout, target)
    assert (target / table).read_text(encoding="utf-8") == "one"
    (checkout / table).write_text("two", encoding="utf-8")
    (checkout / "data/side_files/judge").mkdir()
    (checkout / table).with_name("another.csv").write_text("more", encoding="utf-8")
    add_side_files(checkout, target)
    assert (target / table).read_text(encoding="utf-8") == "two"  # mended or fetched anew since: no stale copy
    assert (target / table).with_name("another.csv").is_file()
    assert sorted(path.name for path in (target / "data/side_files").iterdir()) == ["judge", "office"]
    (checkout / table).with_name("another.csv").unlink()
    add_side_files(checkout, target)
    assert not (target / table).with_name("another.csv").exists()


def test_an_older_snapshot_keeps_the_side_files_that_it_pins(checkout, tmp_path):
    pins, table = Path("configs/data/side_files.yaml"), Path("data/side_files/office/table.csv")
    for path, text in ((pins, "old pins"), (table, "old")):
        (checkout / path).parent.mkdir(parents=True)
        (checkout / path).write_text(text, encoding="utf-8")
    git(checkout, "add", "configs")
    target = take(checkout, tmp_path / "snapshots")
    add_side_files(checkout, target)
    (checkout / pins).write_text("new pins", encoding="utf-8")
    (checkout / table).write_text("new", encoding="utf-8")
    add_side_files(checkout, target)  # as with REFRESH_CODE_SNAPSHOT=false
    assert (target / table).read_text(encoding="utf-8") == "old"
