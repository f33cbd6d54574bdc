"""Row files read in blocks of whole lines, at the speed of the disk: counted and checked, but not parsed as JSON.

Memory is a few blocks, or the longest line if that is longer.

Row files in constant memory: hashed while they are written, read line by line.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recipes.errors import DataError, Problem
from recipes.files import atomic_writer

TRAIN, TEST, VALIDATION = "train-split.jsonl", "test-split.jsonl", "val-split.jsonl"
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


Lines = bytes | memoryview

BLOCK = 1 << 20  # bytes read at once; larger blocks do not fit the processor's cache and are slower
LINE_END = 1 << 16  # bytes at the end of a block that are searched for the beginning of its last line
NO_AGENT = "(no agent)"

BLANK = rb"[ \t\r\v\f]*"
EMPTY_LINE = re.compile(rb"\A" + BLANK + rb"(?:\n|\Z)|\n" + BLANK + rb"\n|\n[ \t\r\v\f]+\Z")
# Within a JSON string the quotes would be escaped, so that the pattern does not match there.
AGENT = re.compile(rb'"agent_ref"\s*:\s*\{[^{}]*?"name"\s*:\s*"([^"]*)"')
BRACE, NEWLINE = b"{\n"


@dataclass(slots=True)
class FileTotals:
    """Hash, size, rows and agents of a file. Agents are found by a pattern, which a hostile row can deceive."""

    sha256: Any = field(default_factory=hashlib.sha256)
    size: int = 0
    rows: int = 0
    agents: Counter[bytes] = field(default_factory=Counter)

    def count(self, block: Lines, num_lines: int) -> None:
        """Add a block of whole lines to all but the hash, which another thread updates."""
        self.size += len(block)
        self.rows += num_lines
        self.agents.update(AGENT.findall(block))

    def copy(self) -> FileTotals:
        """Return a copy that later blocks do not change."""
        return FileTotals(sha256=self.sha256.copy(), size=self.size, rows=self.rows, agents=self.agents.copy())

    def as_output(self, path: Path) -> dict[str, Any]:
        """Return the manifest's entry of a file with these totals."""
        return {"file": path.name, "sha256": self.sha256.hexdigest(), "bytes": self.size, "rows": self.rows}

    def rows_by_agent(self) -> dict[str, int]:
        """Return the number of rows per agent, by name."""
        counts = {name.decode(errors="replace"): count for name, count in sorted(self.agents.items())}
        without = self.rows - sum(counts.values())
        return counts | ({NO_AGENT: without} if without > 0 else {})


def require_objects(path: Path) -> None:
    """Raise `DataError` for a file that does not begin with `{`: a compressed one, or one with a byte order mark."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if start and not start.startswith(b"{"):
        got, fix = f"a line that begins with {start[:4]!r}", "decompress the file, or remove its byte order mark"
        raise DataError(Problem(where=f"{path}:1", got=got, expected="one JSON object in each line", fix=fix))


def count_lines(block: Lines) -> tuple[int, bool]:
    """Return how many lines a block has, and whether one is blank; fast when every line begins with a brace."""
    content = np.frombuffer(block, dtype=np.uint8)
    starts = np.flatnonzero(content[:-1] == NEWLINE) + 1
    is_plain = content[0] == BRACE and bool((content[starts] == BRACE).all())
    return len(starts) + 1, not is_plain and EMPTY_LINE.search(block) is not None


def is_text(block: Lines) -> bool:
    """Return whether whole lines are UTF-8 without NUL bytes."""
    content = np.frombuffer(block, dtype=np.uint8)
    if content.min() == 0:
        return False
    if content.max() < 0x80:  # ASCII
        return True
    try:
        str(block, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def require_text_lines(path: Path) -> None:
    """Raise `DataError` at the first line that is empty, holds a NUL byte or is invalid UTF-8."""
    for number, line in read_lines(path):
        if not is_text(line):
            wrong = "the line holds a NUL byte" if b"\0" in line else "the line is invalid UTF-8"
            fix = "correct or remove the line; NUL bytes are left by a copy that was cut"
            raise DataError(Problem(where=f"{path}:{number}", wrong=wrong, fix=fix))


def read_blocks(path: Path, *, cuts: Sequence[int], num_buffers: int) -> Iterator[tuple[Lines, int, int]]:
    """Yield (block, its number of lines, how many cuts lie before it); at each of these bytes a line must begin.

    `num_buffers` buffers are reused in turn, because fresh memory costs twice as much: a block is valid until
    `num_buffers` more were yielded. Raises `DataError` for an empty line, a NUL byte and invalid UTF-8.
    """
    buffers = [bytearray(BLOCK) for _ in range(num_buffers)]
    position, size = 0, path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for buffer in itertools.cycle(buffers):
            if position == size:
                return
            part = bisect.bisect_right(cuts, position)
            limit = cuts[part] if part < len(cuts) else size
            file.seek(position)
            block = _whole_lines(path, file, memoryview(buffer)[: limit - position], is_last=limit - position <= BLOCK)
            if not block:
                raise changed(path)
            num_lines, has_empty_line = count_lines(block)
            if has_empty_line or not is_text(block):
                require_text_lines(path)
                raise changed(path)  # the second reading found nothing wrong
            yield block, num_lines, part
            position += len(block)


def _whole_lines(path: Path, file: FileIO, buffer: memoryview, *, is_last: bool) -> Lines:
    """Return whole lines read into `buffer`; a line longer than the buffer is returned in memory of its own."""
    start = file.tell()
    block = buffer[: file.readinto(buffer)]
    if is_last:
        return block
    end = bytes(block[-LINE_END:]).rfind(b"\n") + 1
    if end:
        return block[: len(block) - min(LINE_END, len(block)) + end]
    with path.open("rb") as again:
        again.seek(start)
        return again.read(len(block)) + again.readline()


def line_at(path: Path, position: int) -> int:
    """Return the number, from 1, of the line that begins at byte `position`."""
    number = 1
    with path.open("rb") as file:
        while position > 0 and (block := file.read(min(position, BLOCK))):
            position -= len(block)
            number += block.count(b"\n")
    return number


def changed(path: Path) -> DataError:
    """Return the error of an input that changed while it was read."""
    wrong = "the file changed while it was read"
    return DataError(Problem(where=str(path), wrong=wrong, fix="run it again when nothing writes to the file"))


def start_of_last_lines(path: Path, count: int) -> int | None:
    """Return the byte at which the last `count` lines begin; None when the file has no line before them."""
    with path.open("rb") as file:
        position = file.seek(0, 2)
        if position == 0:
            return None
        position -= 1  # the newline at the end of the file does not begin a line
        missing = count
        while position > 0:
            start = max(0, position - BLOCK)
            file.seek(start)
            block = file.read(position - start)
            found = block.count(b"\n")
            if found >= missing:
                at = len(block)
                for _ in range(missing):
                    at = block.rindex(b"\n", 0, at)
                return start + at + 1
            missing, position = missing - found, start
    return None
