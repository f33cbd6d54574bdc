"""A repository with a fix in its history, as images of SWE instances have it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from speed import patiently

CANARY = "only-the-fix-says-this"
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", f"def add(a, b):\n    return a + b  # {CANARY}\n"
OLD_TEST = "from calc import add\n\n\ndef test_zero():\n    assert add(2, 0) == 2\n"
NEW_TEST = OLD_TEST + "\n\ndef test_sum():\n    assert add(2, 3) == 5\n"
ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


@dataclass(frozen=True)
class Project:
    """A repository as images of SWE instances have it."""

    base: str
    fix: str  # the later commit
    blob: str  # of the fixed file
    patch: str
    test_patch: str


def git(repository: Path, *words: str) -> str:
    env = {**os.environ, **ENVIRONMENT}
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=patiently(30)).stdout


def write_project(repository: Path) -> Project:
    """Write a history: base commit, the fix after it under every kind of name, and the image's own commit on top."""
    repository.mkdir()
    git(repository, "init", "--quiet", "--initial-branch", "main")
    (repository / "calc.py").write_text(WRONG, encoding="utf-8")
    (repository / "test_calc.py").write_text(OLD_TEST, encoding="utf-8")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "Base")
    git(repository, "tag", "-a", "-m", "old", "v1")
    base = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text(RIGHT, encoding="utf-8")
    git(repository, "commit", "--quiet", "-a", "-m", f"Fix: {CANARY}")
    fix = git(repository, "rev-parse", "HEAD").strip()
    blob = git(repository, "rev-parse", "HEAD:calc.py").strip()
    patch = git(repository, "diff", base, fix)
    git(repository, "tag", "-a", "-m", "new", "v2")
    git(repository, "branch", "future")
    git(repository, "update-ref", "refs/remotes/origin/main", fix)
    git(repository, "remote", "add", "origin", "https://example.com/project.git")
    git(repository, "gc", "--quiet")  # what is packed must go too
    (repository / "stashed.py").write_text(f"# {CANARY}\n", encoding="utf-8")
    git(repository, "stash", "--include-untracked", "--quiet")
    git(repository, "reset", "--quiet", "--hard", base)
    (repository / "setup.cfg").write_text("[tool:pytest]\n", encoding="utf-8")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "SWE-bench")
    (repository / "test_calc.py").write_text(NEW_TEST, encoding="utf-8")
    test_patch = git(repository, "diff")
    git(repository, "checkout", "--quiet", "--", ".")
    return Project(base, fix, blob, patch, test_patch)
