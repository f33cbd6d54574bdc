"""The images of the tiny repositories: directories with a root file system, made of this machine's own programs.

All of them share one base, a few programs with their libraries and the part of Python that unittest loads: a file of
the base is the same file in every image, under a name of its own. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.environments.swe.hidden_tests import WORKSPACE
from recipes.errors import LaunchError, Problem
from tools.tiny.repositories import TinyRepository, write_repository

PROGRAMS = (
    *("bash", "git", "basename", "cat", "chmod", "comm", "cp", "cut", "diff", "dirname", "env", "find", "grep", "head"),
    *("ls", "mkdir", "mktemp", "mv", "rm", "sed", "sort", "tail", "touch", "tr", "uniq", "wc", "xargs"),
)
EMPTY = ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr/bin", "usr/lib", "var")
LIBRARY = re.compile(r"(/\S+) \(0x")
# What the tests import beside what Python loads at its start, so that its files can be listed.
LOAD = (
    "import argparse, base64, difflib, encodings.ascii, gettext, hmac, json, locale, pprint, shutil, subprocess, sys, "
    "unittest, zlib"
)
LIST = f"{LOAD}\nprint(*(getattr(m, '__file__', None) or '' for m in list(sys.modules.values())), sep='\\n')"
NOBODY = 65534  # whose containers are, where this process is root
SECONDS = 120.0


def make_images(directory: Path, repositories: Iterable[TinyRepository]) -> None:
    """Make the image of every repository that has none yet, or an old one: a directory named by its instance."""
    wanted = list(repositories)
    base = _base(directory)
    made = 0
    for repository in wanted:
        image, digest = directory / repository.id, _digest(base.name, repository)
        stamp = directory / f".{repository.id}.sha256"
        if image.is_dir() and stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
            continue
        partial = directory / f".{repository.id}.partial"
        stamp.unlink(missing_ok=True)
        for stale in (partial, image):
            shutil.rmtree(stale, ignore_errors=True)
        shutil.copytree(base, partial, copy_function=os.link, symlinks=True)
        workspace = partial / WORKSPACE.lstrip("/")
        write_repository(repository, workspace)
        _git(workspace, "read-tree", "HEAD")
        _git(workspace, "update-index", "--refresh", "-q")
        give_away(partial)
        partial.rename(image)
        stamp.write_text(digest, encoding="utf-8")
        made += 1
    print(f"images: {directory}: {made} made, {len(wanted) - made} up to date")


def _digest(base: str, repository: TinyRepository) -> str:
    said = [base, repository.history.commits, repository.files(repository.planted)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _git(workspace: Path, *words: str) -> None:
    env = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "-C", str(workspace), *words], env=env, check=True, capture_output=True, timeout=SECONDS)


def give_away(root: Path) -> None:
    """Give a root file system to the user whose containers are."""
    if os.geteuid() == 0:
        for path in (root, *root.rglob("*")):
            if path.lstat().st_uid != NOBODY:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _base(directory: Path) -> Path:
    """Return the root file system that all images share, made anew when a file of it has changed on this machine."""
    files = dict(sorted(_files()))
    known = [
        [target, str(source), source.stat().st_size, source.stat().st_mtime_ns] for target, source in files.items()
    ]
    base = directory / f".base-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}"
    if base.is_dir():
        return base
    partial = directory / ".base.partial"
    shutil.rmtree(partial, ignore_errors=True)
    for name in EMPTY:
        (partial / name).mkdir(parents=True, exist_ok=True)
    (partial / "tmp").chmod(0o1777)
    for target, source in files.items():
        place = partial / target
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
        place.chmod(place.stat().st_mode & 0o777 | 0o444)
        if place.suffix == ".py":
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(place), dfile=f"/{target}", doraise=True, invalidation_mode=unchecked)
    for name in ("bin", "sbin", "lib", "lib64"):
        (partial / "usr" / name).mkdir(exist_ok=True)
        (partial / name).symlink_to(f"usr/{name}")
    (partial / "usr/bin/sh").symlink_to("bash")
    for name in ("python", "python3"):
        (partial / "usr/bin" / name).symlink_to(f"python{_version()}")
    (partial / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n", encoding="utf-8")
    give_away(partial)
    partial.rename(base)
    return base


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _files() -> Iterator[tuple[str, Path]]:
    """Yield (path in the image, file of this machine); raises `LaunchError` with every program that is missing."""
    found = {name: shutil.which(name) for name in PROGRAMS}
    if missing := [name for name, path in found.items() if path is None]:
        fix = "install it (Debian: bash coreutils diffutils findutils git grep sed)"
        raise LaunchError([Problem(where=name, wrong="not on PATH", fix=fix) for name in missing])
    programs = {f"usr/bin/{name}": Path(path or "").resolve() for name, path in found.items()}
    programs[f"usr/bin/python{_version()}"] = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    modules = dict(_modules())
    yield from programs.items()
    yield from modules.items()
    binaries = [*programs.values(), *(path for path in modules.values() if path.suffix == ".so")]
    for binary in binaries:
        listed = subprocess.run(
            ["ldd", str(binary)], capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=SECONDS
        ).stdout
        for library in LIBRARY.findall(listed):
            place = library if library.startswith("/usr/lib") else f"/usr/lib/{Path(library).name}"
            yield (f"usr{library}" if library.startswith("/lib") else place.lstrip("/")), Path(library).resolve()


def _modules() -> Iterator[tuple[str, Path]]:
    """Yield (path in the image, file) of the modules that tests load."""
    python = getattr(sys, "_base_executable", sys.executable)
    listed = subprocess.run(
        [python, "-I", "-c", LIST], capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=SECONDS
    ).stdout
    library = Path(sysconfig.get_paths()["stdlib"])
    for line in [*listed.split("\n"), str(library / "os.py"), str(library / "unittest/__main__.py")]:
        source = Path(line)
        if line and source.is_relative_to(library):
            yield f"usr/lib/python{_version()}/{source.relative_to(library)}", source
