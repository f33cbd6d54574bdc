"""Row files: atomic writing, hashing and counting in constant memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from recipes.grpo.errors import DataError, Problem

CHUNK = 1 << 20  # bytes read at once


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its name when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file so that it is seen either as it was or complete."""
    with atomic_writer(path) as file:
        file.write(content)


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_file(path: Path, *, fix: str) -> None:
    """Raise `DataError` when `path` is not a file."""
    if not path.is_file():
        raise DataError(Problem(where=str(path), got="no such file", expected="a JSONL file", fix=fix))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line with its newline); raises `DataError` at an empty line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                raise DataError(empty_line(path, number))
            yield number, line


def empty_line(path: Path, number: int) -> Problem:
    """Return the problem of a line that holds no row."""
    return Problem(where=f"{path}:{number}", got="an empty line", expected="one JSON object", fix="remove the line")
