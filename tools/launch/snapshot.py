"""Copy exactly the tracked files of this checkout for one run, under a name made from their content.

    code_snapshots/<EXP_NAME>/<commit>-<hash of the diff>/

The name changes with the code, so a relaunch never writes into the snapshot of a running job.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Which code runs: a commit and what differs from it."""

    commit: str
    diff: str  # of tracked files against the commit; empty when there is none

    @property
    def diff_sha256(self) -> str:
        return hashlib.sha256(self.diff.encode()).hexdigest() if self.diff else ""

    @property
    def name(self) -> str:
        return f"{self.commit[:12]}-{self.diff_sha256[:12] or 'clean'}"


def git(root: Path, *args: str) -> str:
    """Return what a git command prints."""
    return subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True, text=True).stdout


def read_code(root: Path) -> Code:
    """Return the commit and diff of the checkout; outside git both are empty."""
    if not (root / ".git").exists():
        return Code(commit="", diff="")
    return Code(commit=git(root, "rev-parse", "HEAD").strip(), diff=git(root, "diff", "--binary", "HEAD"))


def snapshot_path(home: Path, code: Code, *, reuse_newest: bool) -> Path:
    """Return where the snapshot of this code is, or the newest in `home` when that is to be taken again."""
    if reuse_newest and home.is_dir():
        existing = [path for path in home.iterdir() if not path.name.startswith(".")]
        if existing:
            return max(existing, key=lambda path: path.stat().st_mtime)
    return home / code.name


def write_snapshot(root: Path, target: Path, code: Code) -> None:
    """Copy the tracked files to `target`, with COMMIT and DIFF beside them; a snapshot that exists stays untouched."""
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    for name in git(root, "ls-files", "-z").split("\0"):
        source = root / name
        if name and source.is_file():  # a tracked file may be deleted in the working tree
            copy = partial / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    (partial / "COMMIT").write_text(f"{code.commit}\n")
    (partial / "DIFF").write_text(code.diff)
    partial.replace(target)
