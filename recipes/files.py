"""Writing a file whole or not at all, and its hash: the one way in which this project replaces a file."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_writer(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its name when the block ends without an error.

    `is_durable` waits until the disk has it. Large files whose manifest holds their hash need not: one that was lost
    with the power is found by it and made again, and waiting takes longer than everything else.
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
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = str(path)  # a full disk does not say what it had no room for
        raise
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
