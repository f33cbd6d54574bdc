"""Rows in blocks of whole lines: what a file holds, read once at the speed of the disk and never parsed.

Memory is one block, or the longest line if that is longer.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from recipes.errors import DataError, Problem
from tools.files.row_files import read_lines

Lines = bytes | memoryview

BLOCK = 1 << 20  # bytes read at once; more leaves the processor's cache
LINE_END = 1 << 16  # bytes at the end of a block in which the last line is expected to begin
NO_AGENT = "(no agent)"

BLANK = rb"[ \t\r\v\f]*"
EMPTY_LINE = re.compile(rb"\A" + BLANK + rb"(?:\n|\Z)|\n" + BLANK + rb"\n|\n[ \t\r\v\f]+\Z")
AGENT = re.compile(rb'"agent_ref"\s*:\s*\{[^{}]*?"name"\s*:\s*"([^"]*)"')  # inside a text its quotes are escaped
BRACE, NEWLINE = b"{\n"


@dataclass(slots=True)
class Content:
    """Hash, size, rows and agents of what passed by. Agents are found without parsing, which a row could deceive."""

    sha256: Any = field(default_factory=hashlib.sha256)
    size: int = 0
    rows: int = 0
    agents: Counter[bytes] = field(default_factory=Counter)

    def count(self, block: Lines, num_lines: int) -> None:
        """Take in a block of whole lines whose hash is taken by another thread."""
        self.size += len(block)
        self.rows += num_lines
        self.agents.update(AGENT.findall(block))

    def copy(self) -> Content:
        """Return the content so far."""
        return Content(sha256=self.sha256.copy(), size=self.size, rows=self.rows, agents=self.agents.copy())

    def as_output(self, path: Path) -> dict[str, Any]:
        """Return the manifest's entry of a file with this content."""
        return {"file": path.name, "sha256": self.sha256.hexdigest(), "bytes": self.size, "rows": self.rows}

    def rows_by_agent(self) -> dict[str, int]:
        """Return the number of rows per agent, by name."""
        counts = {name.decode(errors="replace"): count for name, count in sorted(self.agents.items())}
        without = self.rows - sum(counts.values())
        return counts | ({NO_AGENT: without} if without > 0 else {})


def require_objects(path: Path) -> None:
    """Raise `DataError` for a file that does not begin with an object: compressed, or with a byte order mark."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if start and not start.startswith(b"{"):
        got, fix = f"a line that begins with {start[:4]!r}", "unpack the file, or take a byte order mark away"
        raise DataError(Problem(where=f"{path}:1", got=got, expected="one JSON object in each line", fix=fix))


def count_lines(block: Lines) -> tuple[int, bool]:
    """Return how many lines a block has, and whether one is blank; quick where every line begins with a brace."""
    content = np.frombuffer(block, dtype=np.uint8)
    starts = np.flatnonzero(content[:-1] == NEWLINE) + 1
    is_plain = content[0] == BRACE and bool((content[starts] == BRACE).all())
    return len(starts) + 1, not is_plain and EMPTY_LINE.search(block) is not None


def read_blocks(path: Path, *, end_of_first: int, num_buffers: int) -> Iterator[tuple[Lines, int, bool]]:
    """Yield (block, its lines, whether it lies before byte `end_of_first`, which must begin a line).

    A block is good until `num_buffers` more were asked for: memory that is used again costs half of memory that is
    not. Refuses empty lines.
    """
    buffers = [bytearray(BLOCK) for _ in range(num_buffers)]
    position, size = 0, path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for buffer in itertools.cycle(buffers):
            if position == size:
                return
            limit = end_of_first if position < end_of_first else size
            file.seek(position)
            block = _whole_lines(path, file, memoryview(buffer)[: limit - position], is_last=limit - position <= BLOCK)
            if not block:
                raise changed(path)
            num_lines, has_empty_line = count_lines(block)
            if has_empty_line:
                for _ in read_lines(path):  # raises with the number of the line
                    pass
                raise changed(path)
            yield block, num_lines, position < end_of_first
            position += len(block)


def _whole_lines(path: Path, file: FileIO, buffer: memoryview, *, is_last: bool) -> Lines:
    """Fill `buffer` as far as lines are whole; one that does not fit comes in memory of its own."""
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
    """Return the error of an input that is not what it was a moment ago."""
    return DataError(
        Problem(where=str(path), got="an input that changes while it is read", expected="no change", fix="rerun")
    )


def start_of_last_lines(path: Path, count: int) -> int | None:
    """Return the byte at which the last `count` lines begin, read from the end; None if there are not more lines."""
    with path.open("rb") as file:
        position = file.seek(0, 2)
        if position == 0:
            return None
        position -= 1  # a newline that ends the file begins no line
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
