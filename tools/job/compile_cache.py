"""What this node's engines compile: kept on its own disk, filled from one file that all nodes read.

    PERSISTENT_CACHE/compiled/vllm-V-torch-V.tar   read by every node when it starts; only ever replaced as a whole
    /tmp/compiled-rl-UID/                          of one node, mode 0700: vllm, flashinfer, triton, inductor

A hundred engines that write one shared directory wait for each other's locks, and thousands of small files keep the
file server busy; one file is read in one go. The directory has the same name in every job, because FlashInfer compiles
again where its directory has another one. Jobs of one user on one node share it; the last of them removes it, after it
has kept what is new for later jobs. A cache is never needed: what goes wrong with it is said, and the job goes on.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from recipes.files import atomic_writer

VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
_SEEDS = "compiled"  # below PERSISTENT_CACHE
_FILLED_FROM = "filled_from"  # in the directory: which seed its files came from
_MAX_BYTES = 16 * 2**30  # of a file for later jobs; what would be larger is not kept
_JOIN_SECONDS = 300.0  # for another job of this user to fill the directory
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCache:
    """The caches of this node while a job runs."""

    path: Path
    seed: Path  # may not exist
    lock: int  # descriptor of `path`

    def variables(self) -> dict[str, str]:
        """Return what the engines are started with."""
        return {name: str(self.path / directory) for name, directory in VARIABLES.items()}


def seed_path(cache: Path) -> Path:
    """Return the file below PERSISTENT_CACHE for the installed versions."""
    return cache / _SEEDS / f"vllm-{_version('vllm')}-torch-{_version('torch')}.tar"


def open_cache(parent: Path, seed: Path) -> CompileCache | None:
    """Make and fill this node's directory below `parent`, or join another job of this user that has it.

    None when somebody else has a directory of this name, or no lock comes: the engines then compile where they like.
    """
    path = parent / f"compiled-rl-{os.getuid()}"
    end = time.monotonic() + _JOIN_SECONDS
    while time.monotonic() < end:
        try:
            lock = _open_own(path)
        except OSError as error:
            _say(f"{path}: {error.strerror or error}; this node keeps no compile caches")
            return None
        is_there = os.fstat(lock).st_nlink > 0  # else another job has removed it since
        if is_there and _flock(lock, fcntl.LOCK_EX):
            is_there = os.fstat(lock).st_nlink > 0
            if is_there:
                _fill(path, seed)
        if is_there and _flock(lock, fcntl.LOCK_SH) and os.fstat(lock).st_nlink:
            return CompileCache(path=path, seed=seed, lock=lock)
        os.close(lock)  # another job fills the directory, or has removed it
        time.sleep(_POLL_SECONDS)
    _say(f"{path} is being filled since {_JOIN_SECONDS:g} s; this node keeps no compile caches")
    return None


def close_cache(cache: CompileCache) -> None:
    """Leave the directory; the last job to leave keeps what is new in it and removes it."""
    try:
        if _flock(cache.lock, fcntl.LOCK_EX):
            try:
                _keep(cache)
            except (OSError, tarfile.TarError) as error:
                _say(f"{cache.seed} was not replaced: {error}")
            shutil.rmtree(cache.path, ignore_errors=True)
    finally:
        os.close(cache.lock)


def _open_own(path: Path) -> int:
    """Make the directory if need be and open it; raises `OSError` when it is not this user's alone."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(opened)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(opened)
        raise PermissionError(f"belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}")
    return opened


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _fill(path: Path, seed: Path) -> None:
    """Put the seed's files into the directory, and nothing else."""
    try:
        _empty(path)
        if not seed.exists():
            return
        with seed.open("rb") as file:
            try:
                with tarfile.open(fileobj=file) as tar:
                    tar.extractall(path, filter="data")
            except tarfile.TarError as damage:  # it is replaced when the job ends
                _say(f"{seed}: {damage}; this node compiles anew")
                _empty(path)
            (path / _FILLED_FROM).write_text(_stamp(os.fstat(file.fileno())), encoding="utf-8")
    except OSError as error:
        _say(f"{seed}: {error}; this node compiles anew")
        _empty(path)
    except SystemExit:  # the job was cancelled meanwhile
        shutil.rmtree(path, ignore_errors=True)
        raise


def _keep(cache: CompileCache) -> None:
    """Replace the seed when this node has compiled something, unless another node has replaced it meanwhile."""
    note = cache.path / _FILLED_FROM
    was, names = note.read_text(encoding="utf-8") if note.exists() else "", _names(cache.path) - {_FILLED_FROM}
    cache.seed.parent.mkdir(parents=True, exist_ok=True)
    with cache.seed.with_suffix(".lock").open("w", encoding="utf-8") as lock:
        if not _flock(lock.fileno(), fcntl.LOCK_EX):
            return  # another node replaces it, or this file system has no locks and two could write at once
        if (_stamp(cache.seed.stat()) if cache.seed.exists() else "") != was:
            return
        new = names - (_names_in(cache.seed) if was else set())
        if not new:
            return
        if (size := sum((cache.path / name).stat().st_size for name in names)) > _MAX_BYTES:
            _say(f"{cache.path}: {size / 2**30:.1f} GiB are too many to keep; remove {cache.seed} to begin afresh")
            return
        with atomic_writer(cache.seed) as file, tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
            for name in sorted(names):
                tar.add(cache.path / name, arcname=name, recursive=False)
    _say(f"kept {len(names)} compiled files, {len(new)} of them new, in {cache.seed}")


def _stamp(found: os.stat_result) -> str:
    """Return what tells one seed from the next."""
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _names_in(seed: Path) -> set[str]:
    try:
        with tarfile.open(seed) as tar:
            return set(tar.getnames())
    except tarfile.TarError:
        return set()


def _names(path: Path) -> frozenset[str]:
    """Return the regular files below a directory; caches need no links."""
    return frozenset(
        str(Path(directory, name).relative_to(path))
        for directory, _, names in os.walk(path)
        for name in names
        if stat.S_ISREG(Path(directory, name).lstat().st_mode)
    )


def _empty(path: Path) -> None:
    with suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _say(text: str) -> None:
    print(f"compile cache: {text}", file=sys.stderr, flush=True)
