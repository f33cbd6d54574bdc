"""Remove from an image's repository all that git knows beyond the checked-out commit, so that no fix can be read there.

Images of SWE instances often hold the later history of the project, with the commit that solves the instance. What
HEAD reaches stays; branches, remotes, later tags, reflogs and every unreachable object go.

The repository is not trusted: its configuration can make git run programs. So git sees nothing but the .git directory,
as the user nobody, without a network, and may fetch nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.environments.swe.containers.places import AS_NOBODY
from tools.sif.programs import run_program
from tools.sif.registry.errors import ImageError

REPOSITORY = "testbed"  # in all three families
MAX_SETUP_COMMITS = 1  # on top of the base commit: SWE-bench images commit their set-up
SYSTEM = ("usr", "bin", "lib", "lib32", "lib64", "sbin")
LEFTOVERS = ("FETCH_HEAD", "ORIG_HEAD", "MERGE_HEAD", "CHERRY_PICK_HEAD", "packed-refs.lock")
NOBODY = 65534
MAX_PROCESSES = 256
SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "core.worktree=/tmp", "core.pager=cat", "gc.auto=0")
ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": "/tmp",
    "LC_ALL": "C",
    "GIT_DIR": "/repository",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # a partial clone would fetch missing objects by a command of its configuration
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}


class Repository:
    """The repository of one unpacked image."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.path, self._seconds = root / REPOSITORY / ".git", seconds
        if self.path.parent.is_symlink() or self.path.is_symlink() or not self.path.is_dir():
            raise ImageError("history", f"no repository at /{REPOSITORY}")
        if (self.path / "objects" / "info" / "alternates").exists():
            raise ImageError("history", "the repository borrows objects from another one")

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Let nobody write to the repository while the block runs, where this process is root."""
        if os.geteuid() != 0:
            yield
            return
        owner = self.path.stat()
        change_owner(self.path, NOBODY, NOBODY)
        yield
        change_owner(self.path, owner.st_uid, owner.st_gid)

    def git(self, *words: str) -> str:
        """Run git in a sandbox that sees the .git directory and the system's programs, and has no network."""
        with tempfile.TemporaryDirectory(prefix="sif-git-") as name:
            place = Path(name)
            place.chmod(0o711)
            work = place / "work"
            work.mkdir()
            command: list[str | Path] = [AS_NOBODY, work, self.path, "--"]
            command += ["bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent"]
            command += ["--new-session", "--dev", "/dev", "--proc", "/proc", *system_words(), "--tmpfs", "/tmp"]
            command += ["--bind", work / "0", "/repository", "--chdir", "/tmp"]
            # Only inside: outside, the limit would count what the user nobody runs elsewhere on the machine.
            command += ["prlimit", f"--nproc={MAX_PROCESSES}", "--", "git"]
            command += [word for setting in SETTINGS for word in ("-c", setting)]
            return run_program([*command, *words], seconds=self._seconds, environ=ENVIRONMENT, cause="history")

    def lines(self, *words: str) -> list[str]:
        """Return what git printed, by lines."""
        return self.git(*words).split("\n")[:-1]

    def commits(self, *words: str) -> set[str]:
        """Return the commits that `git rev-list` names."""
        return set(self.lines("rev-list", *words))


def system_words() -> list[str | Path]:
    """Return the words that show bubblewrap's command this machine's programs and libraries."""
    words: list[str | Path] = []
    for name in SYSTEM:
        place = Path("/") / name
        if place.is_symlink():
            words += ["--symlink", place.readlink(), place]
        elif place.is_dir():
            words += ["--ro-bind", place, place]
    return words


def change_owner(path: Path, uid: int, gid: int) -> None:
    """Give a directory and all below it to a user; follows no link."""
    os.chown(path, uid, gid, follow_symlinks=False)
    for directory, names, files, descriptor in os.fwalk(path, follow_symlinks=False):
        del directory
        for name in (*names, *files):
            os.chown(name, uid, gid, dir_fd=descriptor, follow_symlinks=False)


def strip_history(root: Path, facts: Mapping[str, Any], *, seconds: float) -> None:
    """Leave only what the checked-out commit reaches; raises `ImageError` unless that is the instance's base commit."""
    repository = Repository(root, seconds)
    with repository.writable():
        head = repository.git("rev-parse", "--verify", "HEAD^{commit}").strip()
        require_base(repository, head, str(facts.get("base_commit") or ""))
        remove_later_history(repository, head)
        verify(repository, head)


def remove_later_history(repository: Repository, head: str) -> None:
    """Remove every reference but the branch of HEAD and tags that HEAD reaches, then what nothing reaches."""
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
        (repository.path / name).unlink(missing_ok=True)
    repository.git("reflog", "expire", "--expire=now", "--expire-unreachable=now", "--all")
    repository.git("repack", "-a", "-d", "-q")
    repository.git("prune", "--expire=now")


def require_base(repository: Repository, head: str, base: str) -> None:
    """Raise `ImageError` unless HEAD is the base commit, or the image's own set-up commit on top of it."""
    if not base:
        raise ImageError("history", "the row names no base commit")
    known = repository.commits(head)
    if base not in known:
        raise ImageError("history", f"HEAD {head[:12]} does not hold the base commit {base[:12]}")
    if len(repository.commits(f"{base}..{head}")) > MAX_SETUP_COMMITS:
        raise ImageError("history", f"HEAD {head[:12]} is beyond the base commit {base[:12]}")


def verify(repository: Repository, head: str) -> None:
    """Raise `ImageError` when the repository still has a commit or file that HEAD does not reach."""
    names = ("cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
    present = {line.split(" ")[1] for line in repository.lines(*names) if not line.startswith("tag ")}
    reached = reachable(repository.lines("rev-list", "--objects", head))
    if left := present - reached:
        raise ImageError("history", f"{len(left)} objects beyond HEAD are left, such as {min(left)[:12]}")


def reachable(lines: Sequence[str]) -> set[str]:
    """Return the objects in the output of `git rev-list --objects`, which writes a path after some."""
    return {line.split(" ", 1)[0] for line in lines}
