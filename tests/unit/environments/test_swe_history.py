"""What `prepare.sh` leaves of a repository: no name, log, file or object from beyond the checked-out commit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from recipes.environments.swe import evaluation

SCRIPT = Path(evaluation.__file__).with_name("prepare.sh")
CANARY = "only-the-fix-says-this"
ENVIRONMENT = {
    **{f"GIT_{who}_{what}": "a@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


def git(repository: Path, *words: str, check: bool = True) -> str:
    command = ["git", "-C", str(repository), *words]
    env = {**os.environ, **ENVIRONMENT}
    return subprocess.run(command, env=env, capture_output=True, errors="replace", check=check, timeout=60).stdout


def commit(repository: Path, text: str, message: str) -> str:
    (repository / "calc.py").write_text(text, encoding="utf-8")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", message)
    return git(repository, "rev-parse", "HEAD").strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str, str]:
    """Return a repository whose later commit is the fix, its base commit and the fix."""
    place = tmp_path / "work"
    place.mkdir()
    git(place, "init", "--quiet", "--initial-branch", "main")
    commit(place, "old\n", "Begin")
    git(place, "tag", "-a", "-m", "old", "v1")
    base = commit(place, "wrong\n", "Base")
    fix = commit(place, f"right {CANARY}\n", f"Fix: {CANARY}")
    git(place, "reset", "--quiet", "--hard", base)
    return place, base, fix


def prepared(place: Path, base: str, *hidden: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), str(place), base, *map(str, hidden)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def in_orig_head(place: Path, fix: str) -> None:
    git(place, "merge", "--quiet", fix)
    git(place, "reset", "--quiet", "--hard", f"{fix}~1")


def in_packed_refs(place: Path, fix: str) -> None:
    git(place, "branch", "future", fix)
    git(place, "tag", "-a", "-m", CANARY, "v2", fix)
    git(place, "update-ref", "refs/remotes/origin/main", fix)
    git(place, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    git(place, "remote", "add", "origin", "https://example.com/project.git")
    git(place, "gc", "--quiet")


def in_kept_pack(place: Path, fix: str) -> None:
    in_packed_refs(place, fix)
    for pack in (place / ".git/objects/pack").glob("*.pack"):
        pack.with_suffix(".keep").touch()


def in_stash(place: Path, fix: str) -> None:
    del fix
    (place / "calc.py").write_text(f"{CANARY}\n", encoding="utf-8")
    git(place, "stash", "--quiet")


def in_worktree(place: Path, fix: str) -> None:
    git(place, "worktree", "add", "--quiet", "--detach", str(place.with_name("other")), fix)


def in_notes(place: Path, fix: str) -> None:
    del fix
    git(place, "notes", "add", "-m", CANARY, "HEAD")


def in_alternate(place: Path, fix: str) -> None:
    lender = place.with_name("lender")
    (place / ".git/objects").rename(lender)
    (place / ".git/objects/info").mkdir(parents=True)
    (place / ".git/objects/pack").mkdir()
    (place / ".git/objects/info/alternates").write_text(f"{lender}\n", encoding="utf-8")
    git(place, "branch", "future", fix)


def in_merge_message(place: Path, fix: str) -> None:
    (place / ".git/MERGE_MSG").write_text(CANARY, encoding="utf-8")
    (place / ".git/FETCH_HEAD").write_text(f"{fix}\t\tbranch 'main' of example\n", encoding="utf-8")


def detached(place: Path, fix: str) -> None:
    git(place, "branch", "--quiet", "-f", "future", fix)
    git(place, "checkout", "--quiet", "--detach")


EVERYWHERE = (in_orig_head, in_notes, in_stash, in_worktree, in_merge_message, in_kept_pack)


@pytest.mark.parametrize("plants", [EVERYWHERE, (in_alternate,), (detached,)], ids=["everywhere", "lent", "detached"])
def test_a_fix_in_the_history_is_out_of_reach(repository, plants: Sequence[Callable[[Path, str], None]]):
    place, base, fix = repository
    for plant in plants:
        plant(place, fix)
    assert git(place, "cat-file", "-t", fix) == "commit\n"
    assert prepared(place, base).stderr == ""
    assert git(place, "log", "-1", "--format=%H").strip() == base
    assert git(place, "log", "--all", "--topo-order", "--format=%s").split() == ["Base", "Begin"]
    assert git(place, "tag").split() == ["v1"]  # versions are computed from it
    assert git(place, "cat-file", "-t", fix, check=False) == ""
    for words in (("reflog", "--all"), ("stash", "list"), ("remote",), ("fsck", "--lost-found", "--full")):
        assert git(place, *words) == ""
    assert CANARY not in git(place, "cat-file", "--batch-all-objects", "--batch")
    assert git(place, "status", "--short") == "" and git(place, "fsck", "--full") == ""
    other = place.with_name("other")  # a work tree elsewhere is a copy of files, and no part of the repository
    left = [path for path in place.parent.rglob("*") if path.is_file() and not path.is_relative_to(other)]
    assert not [path for path in left if CANARY.encode() in path.read_bytes() or fix.encode() in path.read_bytes()]


def test_a_commit_of_the_image_itself_stays(repository):
    place, base, _ = repository
    setup = commit(place, "wrong\n# set up\n", "SWE-bench")
    assert prepared(place, base).returncode == 0
    assert git(place, "rev-parse", "HEAD").strip() == setup


def test_a_repository_at_another_commit_is_refused(repository):
    place, base, fix = repository
    assert "does not hold the base commit" in prepared(place, "0" * 40).stderr
    assert "does not hold the base commit" in prepared(place, fix).stderr
    for number in range(2):
        commit(place, f"more {number}\n", "More")
    done = prepared(place, base)
    assert (done.returncode, "is beyond the base commit" in done.stderr) == (3, True)
    empty = place.with_name("empty")
    empty.mkdir()
    assert "no repository" in prepared(empty, base).stderr


def test_hidden_tests_go(repository):
    place, base, _ = repository
    hidden, there = place / "r2e_tests", place / "run_tests.sh"
    hidden.mkdir()
    (hidden / "test_1.py").touch()
    there.touch()
    assert prepared(place, base, hidden, there, place / "not there").returncode == 0
    assert not hidden.exists() and not there.exists() and (place / "calc.py").exists()


def test_programs_of_the_repository_do_not_run(repository, tmp_path):
    place, base, _ = repository
    program = place / ".git/hooks/reference-transaction"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n", encoding="utf-8")
    program.chmod(0o755)
    git(place, "config", "core.fsmonitor", str(program))
    (tmp_path / "ran").unlink(missing_ok=True)
    assert prepared(place, base).returncode == 0
    assert not (tmp_path / "ran").exists()
