"""Files whole or not at all, hashes, reading an object, a directory's lock, the nearest existing place."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


@contextmanager
def atomic_writer(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its name when the block ends without an error.

    With `is_durable` this waits until the disk holds the file and its name, so that a power cut loses neither. Large
    files whose hash is in a manifest do not need it: the hash shows when one was lost, and it is made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
        if is_durable:
            sync_directory(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = str(path)  # a full disk does not say what it had no room for
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, *, is_durable: bool = True) -> None:
    """Replace a file: readers see the old content or all of the new; see `atomic_writer` for `is_durable`."""
    with atomic_writer(path, is_durable=is_durable) as file:
        file.write(content)


def sync_tree(path: Path) -> None:
    """Wait until the disk holds every file and directory below `path`, and `path` itself."""
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def sync_files(paths: Iterable[Path]) -> None:
    """Wait until the disk holds these files and their names."""
    files = list(paths)
    for path in [*files, *sorted({file.parent for file in files})]:
        _sync(path)


def sync_directory(path: Path) -> None:
    """Wait until the disk holds the names in a directory."""
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file or directory; a file system that cannot flush a directory is left alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def unused(path: Path) -> Path:
    """Return `path`, or where something has this name already, `path.2`, `path.3`, ..."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def nearest_existing(path: Path) -> Path:
    """Return the path itself or the nearest directory above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, empty where the file is missing, was cut or holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def setting_of(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key of nested objects, None where a part of the key leads to nothing."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def readable_sha256(path: Path) -> str | None:
    """Return the hex digest of a file, None where it cannot be read."""
    try:
        return sha256_of(path)
    except (OSError, ValueError):  # a name may hold what no path can
        return None


class FileSum(NamedTuple):
    """What a file holds, in short."""

    sha256: str
    num_bytes: int | None  # None where nobody has noted it


class SummedFile(io.BufferedWriter):
    """A new file, written from its begin to its end, whose sum is computed from what is written: nothing reads it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._sha256, self._num_bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write bytes behind those before."""
        self._sha256.update(data)
        written = super().write(data)
        self._num_bytes += written
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Refuse to go elsewhere: the sum is that of bytes one after the other."""
        raise io.UnsupportedOperation("a summed file is written in order")

    def sum(self) -> FileSum:
        """Return the sum of what was written so far."""
        return FileSum(self._sha256.hexdigest(), self._num_bytes)


def tree_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files below a directory."""
    if not path.is_dir():
        return sha256_of(path)
    files = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{file.as_posix()} {sha256_of(path / file)}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def lock_directory(path: Path) -> int | None:
    """Lock a directory and return the open descriptor; None when another process holds it, or it is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
