"""Copy exactly the tracked files of this checkout for one run, under a name made from their content.

    code_snapshots/<EXP_NAME>/<commit>-<hash of the diff>/     COMMIT and DIFF beside the files

The name changes with the code, so a relaunch never writes into the snapshot of a running job. Only what verifiers read
besides the rows is added later, and kept as it is in the checkout: it is data, which git does not track.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import LaunchError, Problem
from recipes.files import tree_sha256

SIDE_FILES = Path("data") / "side_files"  # a directory per verifier, written whole by `make data`
PINS = Path("configs") / "data" / "side_files.yaml"  # which files those are, by hash

# Whatever the user's git configuration says: the diff must apply, and its hash must be the same for everybody.
_DIFF = ("-c", "core.quotePath=true", "diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")
_PLAIN = ("--src-prefix=a/", "--dst-prefix=b/", "--no-renames", "--submodule=short", "HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVersion:
    """Which code runs: a commit and what differs from it."""

    commit: str  # empty outside git
    diff: str  # of tracked files against the commit; empty when there is none; bytes that are no text are surrogates

    @property
    def diff_sha256(self) -> str:
        return hashlib.sha256(os.fsencode(self.diff)).hexdigest() if self.diff else ""

    @property
    def name(self) -> str:
        return f"{self.commit[:12]}-{self.diff_sha256[:12] or 'clean'}"


def git(root: Path, *args: str) -> str:
    """Return what a git command prints; raises `LaunchError` with git's message."""
    done = subprocess.run(["git", "-C", str(root), *args], check=False, capture_output=True)
    if done.returncode == 0:
        return os.fsdecode(done.stdout)
    got = os.fsdecode(done.stderr).strip().splitlines()
    raise LaunchError(
        Problem(
            where=f"git in {root}",
            wrong=f"`git {args[0]}` failed: {got[0] if got else f'status {done.returncode}'}",
            fix="repair the checkout, or run from it as it is with SKIP_CODE_SNAPSHOT=true",
        )
    )


def read_code(root: Path) -> CodeVersion:
    """Return the commit and diff of the checkout; outside git both are empty."""
    if not (root / ".git").exists():
        return CodeVersion(commit="", diff="")
    return CodeVersion(commit=git(root, "rev-parse", "HEAD").strip(), diff=git(root, *_DIFF, *_PLAIN))


def read_snapshot(path: Path) -> CodeVersion:
    """Return the commit and diff that a snapshot was taken from."""
    return CodeVersion(
        commit=(path / "COMMIT").read_text(encoding="utf-8").strip(), diff=os.fsdecode((path / "DIFF").read_bytes())
    )


def snapshot_path(home: Path, code: CodeVersion, *, reuse_newest: bool) -> Path:
    """Return where the snapshot of this code is, or the newest in `home` when that is to be used again."""
    if reuse_newest and home.is_dir():
        existing = [path for path in home.iterdir() if (path / "COMMIT").is_file() and not path.name.startswith(".")]
        if existing:
            return max(existing, key=lambda path: (path / "COMMIT").stat().st_mtime_ns)
    return home / code.name


def untracked(root: Path, paths: Iterable[Path]) -> list[Path]:
    """Return those of the paths that lie in the checkout but would be missing from its snapshot."""
    tracked = {root / name for name in tracked_names(root)}
    return [path for path in paths if path.is_relative_to(root) and path not in tracked]


def tracked_names(root: Path) -> list[str]:
    """List the tracked files of the checkout and its submodules; raises `LaunchError` outside git."""
    return [name for name in git(root, "ls-files", "-z", "--recurse-submodules").split("\0") if name]


def write_snapshot(root: Path, target: Path, code: CodeVersion) -> None:
    """Copy the tracked files to `target`, with COMMIT and DIFF beside them; a snapshot that exists stays untouched.

    Raises `LaunchError` when a file was changed meanwhile: the copy would not be what its name says.
    """
    if target.exists():
        return
    names = tracked_names(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        partial.chmod(0o755)  # mkdtemp's is for this user alone
        for name in names:
            source = root / name
            if source.is_symlink() or source.is_file():  # a tracked file may be deleted in the working tree
                copy = partial / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)
        (partial / "COMMIT").write_text(f"{code.commit}\n", encoding="utf-8")
        (partial / "DIFF").write_bytes(os.fsencode(code.diff))
        if read_code(root) != code:
            raise LaunchError(
                Problem(where=str(root), wrong="files changed while they were copied", fix="launch again")
            )
        with suppress(OSError):  # another launch of the same code was first
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if not target.is_dir():
        fix = "check permissions and space there"
        raise LaunchError(Problem(where=str(target), wrong="the copy of the code could not be made", fix=fix))


def add_side_files(root: Path, target: Path) -> None:
    """Make the side files of each verifier in a snapshot those of the checkout; another run of its name is refused.

    An older snapshot that pins others keeps its own.
    """
    source = root / SIDE_FILES
    has_own = (target / PINS).is_file() and (target / PINS).read_bytes() != (root / PINS).read_bytes()
    for directory in sorted(source.iterdir()) if source.is_dir() else ():
        copy = target / SIDE_FILES / directory.name
        if not directory.is_dir() or directory.name.startswith("."):
            continue
        if copy.exists() and (has_own or tree_sha256(copy) == tree_sha256(directory)):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{copy.name}.", dir=copy.parent))
        try:
            (partial / "new").mkdir()
            shutil.copytree(directory, partial / "new", dirs_exist_ok=True)
            with suppress(OSError):
                copy.rename(partial / "old")
            with suppress(OSError):  # another launch of the same code was first
                (partial / "new").rename(copy)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
