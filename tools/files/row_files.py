"""Row files in constant memory: hashed while they are written, read line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from recipes.errors import DataError, Problem
from recipes.files import atomic_writer

CHUNK = 1 << 20  # bytes read at once


@dataclass(slots=True)
class HashedWriter:
    """A file that a thread hashes while it is written; the hash is complete when the `with` block has ended."""

    file: BinaryIO
    sha256: Any = field(default_factory=hashlib.sha256)
    size: int = 0
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _last: Future[None] | None = None

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[HashedWriter]:
        """Open a temporary file beside `path` that takes its name when the block ends without an error."""
        with atomic_writer(path, is_durable=False) as file:
            writer = cls(file)
            try:
                yield writer
            finally:
                writer._threads.shutdown(wait=True)

    def write(self, data: bytes) -> None:
        """Append `data`, after the data before it is hashed, so that memory stays bounded."""
        if self._last is not None:
            self._last.result()
        self._last = self._threads.submit(self.sha256.update, data)
        self.file.write(data)
        self.size += len(data)

    def as_output(self, path: Path, **facts: Any) -> dict[str, Any]:
        """Return the manifest's entry of the file."""
        return {"file": path.name, "sha256": self.sha256.hexdigest(), "bytes": self.size, **facts}


def require_file(path: Path, *, fix: str) -> None:
    """Raise `DataError` when `path` is not a file."""
    if not path.is_file():
        wrong = "it is a directory, not a JSONL file" if path.is_dir() else "there is no such file"
        raise DataError(Problem(where=str(path), wrong=wrong, fix=fix))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line with its newline); raises `DataError` at an empty line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                raise DataError(empty_line(path, number))
            yield number, line


def empty_line(path: Path, number: int) -> Problem:
    """Return the problem of a line without a row."""
    return Problem(where=f"{path}:{number}", wrong="the line is empty", fix="remove it")
