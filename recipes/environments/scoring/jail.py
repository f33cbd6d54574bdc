"""How a scoring process is confined: what it sees, what it inherits, and what holds where there are no namespaces.

Everywhere: an environment of its own with nothing of ours in it, limits of memory, processor time, files and open
descriptors, and a filter of system calls for whatever sees model text (`scoring/worker.py`, `confinement/filters.py`).

Where bubblewrap can make namespaces, also: no network devices, no other processes, and of the file system a read-only
view of Python, its packages and `recipes/`. Many clusters forbid namespaces inside their containers. There the filter
alone keeps model text from writing, connecting, and starting or signalling processes; it can read the files that the
account can read (root first becomes nobody), but has no way to send what it reads anywhere. `warning` says so, and the
pool logs it. A machine with neither the filter nor bubblewrap scores nothing that needs a process.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from recipes.confinement import filters
from recipes.confinement.jails import scorer

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 60.0  # of the trial, which starts Python once
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # without these Python may not start, or print otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """The words in front of a command, its environment, and what is weaker here than it should be."""

    words: tuple[str, ...]
    environment: dict[str, str]
    becomes_nobody: bool
    warning: str  # "" with namespaces

    def command(self, commands: int, reports: int) -> list[str]:
        """Return the words that start a loader which has these descriptors."""
        start = f"sys.exit(worker.main({commands}, {reports}, {self.becomes_nobody}))"
        code = f"import sys; sys.path[:0] = {_import_paths()!r}; import recipes.environments.scoring.worker as worker"
        code += f"; {start}"
        return [*self.words, sys.executable, "-I", "-c", code]


@cache
def jail() -> Jail:
    """Return the strongest confinement that works on this machine; raises `RuntimeError` when none does."""
    if not filters.is_supported():
        raise RuntimeError(
            f"no filter of system calls for {os.uname().machine}: responses cannot be scored safely here"
        )
    environment = {
        **{name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    confined = Jail(words=tuple(scorer(_visible())), environment=environment, becomes_nobody=False, warning="")
    problem = _trial(confined)
    if not problem:
        return confined
    home = os.environ.get("HOME", "/tmp")  # libraries keep their caches there
    warning = f"scoring processes have no namespaces of their own ({problem}); a filter of system calls confines them"
    open_jail = Jail(words=(), environment={**environment, "HOME": home}, becomes_nobody=False, warning=warning)
    is_root = os.geteuid() == 0 and _is_readable_by_all()
    return Jail(words=(), environment=open_jail.environment, becomes_nobody=is_root, warning=warning)


def _trial(confined: Jail) -> str:
    """Start a loader without requests; returns why it failed, "" when it did not."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        done = subprocess.run(
            confined.command(0, 1),  # standard input is empty: it ends at once
            env=confined.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"bubblewrap did not start Python within {START_SECONDS:g} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else f"bubblewrap: {lines[-1] if lines else f'status {done.returncode}'}"


def _visible() -> list[Path]:
    """Return the directories that Python and its packages are in, and our own code."""
    executable = Path(sys.executable)
    prefixes = [Path(sys.prefix), Path(sys.base_prefix), executable.parent.parent, executable.resolve().parent.parent]
    paths = [*prefixes, *map(Path, _import_paths()[1:]), ROOT / "recipes"]
    return [path for path in dict.fromkeys(paths) if path.exists() and not path.is_relative_to("/usr")]


def _import_paths() -> list[str]:
    """Return the project's directory, and the directories of packages that Python's isolated mode would not add."""
    further = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    known = {*site.getsitepackages(), str(ROOT)}
    return [str(ROOT), *(path for path in dict.fromkeys(further) if path not in known)]


def _is_readable_by_all() -> bool:
    """Return whether another user could still import what a verifier loads late."""
    places = [*_visible(), *Path(sys.prefix).glob("lib/python*/site-packages")]
    parents = {parent for place in places for parent in (place.resolve(), *place.resolve().parents)}
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in parents)
