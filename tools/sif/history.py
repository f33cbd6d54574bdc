"""Take out of an image's repository all that git knows beyond the checked-out commit, so that no fix can be read there.

Images of SWE instances often hold the later history of the project, with the commit that solves the task. What stays is
what HEAD reaches; branches, remotes, later tags, reflogs and every unreachable object go. Git runs in a sandbox,
because the configuration of a repository can make it run programs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.sif.programs import run_program
from tools.sif.registry.errors import ImageError

REPOSITORY = "testbed"  # in all three families
MAX_ENVIRONMENT_COMMITS = 1  # that an image may have on top of the base commit: SWE-bench commits its own set-up
SYSTEM = ("usr", "bin", "lib", "lib32", "lib64", "sbin")
LEFTOVERS = ("FETCH_HEAD", "ORIG_HEAD", "MERGE_HEAD", "CHERRY_PICK_HEAD", "packed-refs.lock")


class Repository:
    """The repository of one unpacked image."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.path, self._seconds = root / REPOSITORY, seconds
        if self.path.is_symlink() or not (self.path / ".git").is_dir() or (self.path / ".git").is_symlink():
            raise ImageError("history", f"no repository at /{REPOSITORY}")
        if (self.path / ".git" / "objects" / "info" / "alternates").exists():
            raise ImageError("history", "the repository borrows objects from another one")

    def git(self, *words: str) -> str:
        """Run git in a sandbox that sees the repository and the system's programs, and has no network."""
        command: list[str | Path] = ["bwrap", "--unshare-all", "--die-with-parent", "--dev", "/dev", "--proc", "/proc"]
        for name in SYSTEM:
            place = Path("/") / name
            if place.is_symlink():
                command += ["--symlink", place.readlink(), place]
            elif place.is_dir():
                command += ["--ro-bind", place, place]
        command += ["--tmpfs", "/tmp", "--bind", self.path, "/repository", "--chdir", "/repository"]
        settings = ("safe.directory=*", "core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0")
        command += ["git", *(word for setting in settings for word in ("-c", setting)), *words]
        environ = {"PATH": os.defpath, "HOME": "/tmp", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
        return run_program(command, seconds=self._seconds, environ=environ, cause="history")

    def lines(self, *words: str) -> list[str]:
        """Return what git printed, by lines."""
        return self.git(*words).split("\n")[:-1]

    def commits(self, *words: str) -> set[str]:
        """Return the commits that `git rev-list` names."""
        return set(self.lines("rev-list", *words))


def strip_history(root: Path, facts: Mapping[str, Any], *, seconds: float) -> None:
    """Leave only what the checked-out commit reaches; raises `ImageError` when that is not the task's base commit."""
    repository = Repository(root, seconds)
    head = repository.git("rev-parse", "--verify", "HEAD^{commit}").strip()
    require_base(repository, head, str(facts.get("base_commit") or ""))
    kept = repository.commits(head)
    branch = next(iter(repository.lines("rev-parse", "--symbolic-full-name", "HEAD")), "HEAD")
    for line in repository.lines("for-each-ref", "--format=%(objectname) %(*objectname) %(refname)"):
        *objects, name = line.split(" ")
        is_later = not any(entry in kept for entry in objects if entry)
        if name != branch and (is_later or not name.startswith("refs/tags/")):
            repository.git("update-ref", "--no-deref", "-d", name)
    for remote in repository.lines("remote"):
        repository.git("remote", "remove", remote)
    for name in LEFTOVERS:
        (repository.path / ".git" / name).unlink(missing_ok=True)
    repository.git("reflog", "expire", "--expire=now", "--expire-unreachable=now", "--all")
    repository.git("repack", "-a", "-d", "-q")
    repository.git("prune", "--expire=now")
    verify(repository, head)


def require_base(repository: Repository, head: str, base: str) -> None:
    """Raise `ImageError` unless HEAD is the base commit, or the image's own set-up commit on top of it."""
    if not base:
        raise ImageError("history", "the row names no base commit")
    known = repository.commits(head)
    if base not in known:
        raise ImageError("history", f"HEAD {head[:12]} does not hold the base commit {base[:12]}")
    if len(repository.commits(f"{base}..{head}")) > MAX_ENVIRONMENT_COMMITS:
        raise ImageError("history", f"HEAD {head[:12]} is beyond the base commit {base[:12]}")


def verify(repository: Repository, head: str) -> None:
    """Raise `ImageError` when git still has a commit or file that HEAD does not reach (the canary of every image)."""
    names = ("cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
    present = {line.split(" ")[1] for line in repository.lines(*names) if not line.startswith("tag ")}
    reached = reachable(repository.lines("rev-list", "--objects", head))
    if left := present - reached:
        raise ImageError("history", f"{len(left)} objects beyond HEAD are left, such as {min(left)[:12]}")


def reachable(lines: Sequence[str]) -> set[str]:
    """Return the objects of `git rev-list --objects`, which names a path behind some."""
    return {line.split(" ", 1)[0] for line in lines}
