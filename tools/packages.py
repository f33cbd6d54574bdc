"""Packages of a tool that are not the project's own: pinned by hashes, in a directory of their own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from recipes.errors import RunError

SECONDS = 1800.0
# Only what the file names, each by its hash, and nothing that would have to be built.
OPTIONS = ("--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:")
STAMP = ".installed"


def install_packages(requirements: Path, place: Path) -> None:
    """Install what a requirements file names into `place`, for `PYTHONPATH`, unless exactly that is there.

    Raises `RunError` when it cannot be installed; then `place` is as it was.
    """
    pip = [sys.executable, "-m", "pip", "install", *OPTIONS, "-r", str(requirements), "--target"]
    install_once(requirements, place, lambda partial: run_pip([*pip, str(partial)]))


def install_once(requirements: Path, place: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` make a directory from a requirements file, and put it in `place`, unless exactly that is there."""
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = place / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    fill(partial)
    (partial / STAMP).write_text(wanted, encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)


def run_pip(words: list[str]) -> None:
    """Run one command of an installation; raises `RunError`."""
    try:
        done = subprocess.run(words, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        raise RunError(f"`{' '.join(words[:4])} ...` did not end within {SECONDS:g} s") from late
    if done.returncode:
        raise RunError(f"`{' '.join(words[:4])} ...` ended with status {done.returncode}; see above")
