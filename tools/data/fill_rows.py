"""What a worker does with one block of a blend: find its placeholders, then fill them; no other row is looked at."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.data.placeholders import PLACEHOLDER, restore_row
from tools.data.questions import Questions
from tools.files.parallel import Block
from tools.files.row_blocks import changed, count_lines

MARK = PLACEHOLDER.encode()


@dataclass(slots=True, kw_only=True)
class Unfilled:
    """One row that cannot be filled, and why."""

    line: int = 0  # from 1, in its block
    cause: str  # a few words that are counted
    got: str
    expected: str
    fix: str
    content: bytes  # the row as it came


@dataclass(slots=True, kw_only=True)
class Found:
    """What the first pass learns of a block."""

    num_lines: int = 0
    empty_line: int | None = None  # the first, from 1, in the block
    has_mark: bool = False
    needed: dict[str, set[int]] = field(default_factory=dict)  # source name -> rows of it
    unfilled: list[Unfilled] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Filled:
    """What the second pass makes of a block with placeholders: its other rows need not cross between processes."""

    edits: list[tuple[int, int, bytes]] = field(default_factory=list)  # start and end in the block, what goes there
    num_filled: int = 0
    unfilled: list[Unfilled] = field(default_factory=list)  # left out by an edit

    def applied(self, data: bytes) -> bytes:
        """Return the block with its placeholders filled."""
        parts: list[bytes | memoryview] = []
        position, view = 0, memoryview(data)
        for start, end, line in self.edits:
            parts += [view[position:start], line]
            position = end
        return b"".join([*parts, view[position:]])


@dataclass(frozen=True, slots=True)
class PlaceholderRows:
    """The rows of a blend that are to be filled; every other row passes byte for byte."""

    path: Path
    styles: Mapping[str, str]  # source name -> style of its templates
    questions: Questions

    def find(self, block: Block) -> Found:
        """First pass over a block: return what is needed for it."""
        data = self.read(block)
        num_lines, has_empty_line = count_lines(data)
        found = Found(num_lines=num_lines)
        if has_empty_line:
            lines = data.removesuffix(b"\n").split(b"\n")
            found.empty_line = next(number for number, line in enumerate(lines, start=1) if not line.strip())
        unfilled: dict[int, Unfilled] = {}
        for start, end in marked_lines(data):
            found.has_mark = True
            reference = _reference(data[start:end], self.styles)
            if isinstance(reference, Unfilled):
                unfilled[start] = reference
            elif reference is not None:
                _, name, source_row = reference
                found.needed.setdefault(name, set()).add(source_row)
        found.unfilled = _numbered(data, unfilled)
        return found

    def fill(self, block: Block) -> Filled:
        """Second pass over a block, once the questions are there."""
        data, filled = self.read(block), Filled()
        unfilled: dict[int, Unfilled] = {}
        for start, end in marked_lines(data):
            line = data[start:end]
            reference = _reference(line, self.styles)
            if reference is None:
                continue
            result = reference if isinstance(reference, Unfilled) else self._fill(line, reference)
            if isinstance(result, Unfilled):
                unfilled[start] = result
                filled.edits.append((start, end, b""))
            else:
                filled.num_filled += 1
                filled.edits.append((start, end, result))
        filled.unfilled = _numbered(data, unfilled)
        return filled

    def read(self, block: Block) -> bytes:
        """Return the rows of a block; raises `DataError` when the file was cut meanwhile."""
        data = block.read(self.path)
        if len(data) != block.end - block.start:
            raise changed(self.path)
        return data

    def _fill(self, line: bytes, reference: Reference) -> bytes | Unfilled:
        row, name, source_row = reference
        found = self.questions.find(name, source_row)
        if found is None:
            return Unfilled(
                cause="no source row",
                got=f"row {source_row} of {name}, which is not there or has no question or answer",
                expected="a row with both",
                fix="check the revision",
                content=line,
            )
        filled = restore_row(row, style=self.styles[name], question=found[0], answer=found[1])
        try:
            return json.dumps(filled, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half a surrogate pair has no UTF-8 form, only an escaped one
            return json.dumps(filled).encode() + b"\n"


Reference = tuple[Mapping[str, Any], str, int]
"""A placeholder row, and the source and the row of it that it stands for."""


def marked_lines(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each line that may be a placeholder, without looking at the others."""
    position = 0
    while (mark := data.find(MARK, position)) >= 0:
        start = max(position, data.rfind(b"\n", position, mark) + 1)
        position = data.find(b"\n", mark) + 1 or len(data)
        yield start, position


def _numbered(data: bytes, rows: Mapping[int, Unfilled]) -> list[Unfilled]:
    """Return the rows that begin at the given bytes, in order, with the numbers of their lines."""
    line, position = 1, 0
    for start, row in rows.items():
        line, position = line + data.count(b"\n", position, start), start
        row.line = line
    return list(rows.values())


def _reference(line: bytes, sources: Collection[str]) -> Reference | Unfilled | None:
    def unfilled(cause: str, got: str, expected: str, fix: str) -> Unfilled:
        return Unfilled(cause=cause, got=got, expected=expected, fix=fix, content=line)

    try:
        row = json.loads(line)
    except ValueError as error:
        return unfilled(
            "no JSON", f"no JSON ({error})", "one object", "the file is damaged or was edited; get it again"
        )
    if not isinstance(row, dict) or PLACEHOLDER not in row:
        return None
    name, reference = str(row.get("dataset")), row[PLACEHOLDER]
    if name not in sources:
        return unfilled("unknown data set", f"dataset {name}", ", ".join(sorted(sources)), "add it to --sources")
    if not isinstance(reference, dict) or type(reference.get("row")) is not int or reference["row"] < 0:
        expected = "{row: number from 0, question_template: ...}"
        return unfilled("no row number", f"{PLACEHOLDER} {reference!r}", expected, "get the blend again")
    return row, name, reference["row"]
