"""What a worker does with one block of a blend: find its placeholders, then fill them. Other rows are not parsed."""

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
MAX_ROWS = 2**63  # of a source: SQLite knows no larger number


@dataclass(slots=True, kw_only=True)
class UnfilledRow:
    """One row that cannot be filled, and why."""

    line: int = 0  # from 1, within its block
    cause: str  # a few words under which the row is counted
    got: str
    expected: str
    fix: str
    content: bytes  # the row as it came


@dataclass(slots=True, kw_only=True)
class BlockPlaceholders:
    """What the first pass finds in a block."""

    num_lines: int = 0
    empty_line: int | None = None  # the first one, from 1, within the block
    has_mark: bool = False  # the block may hold placeholders
    needed: dict[str, set[int]] = field(default_factory=dict)  # source name -> rows of it
    unfilled: list[UnfilledRow] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class FilledBlock:
    """What the second pass makes of a block with placeholders: edits, so that other rows stay in this process."""

    edits: list[tuple[int, int, bytes]] = field(default_factory=list)  # start, end, new bytes; offsets in the block
    num_filled: int = 0
    unfilled: list[UnfilledRow] = field(default_factory=list)  # an edit removes each of them

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
    """Finds and fills the placeholder rows of a blend."""

    path: Path
    styles: Mapping[str, str]  # source name -> style of its templates
    questions: Questions

    def find(self, block: Block) -> BlockPlaceholders:
        """Run the first pass over a block: return its placeholders and the source rows that they need."""
        data = self.read(block)
        num_lines, has_empty_line = count_lines(data)
        found = BlockPlaceholders(num_lines=num_lines)
        if has_empty_line:
            lines = data.removesuffix(b"\n").split(b"\n")
            found.empty_line = next(number for number, line in enumerate(lines, start=1) if not line.strip())
        unfilled: dict[int, UnfilledRow] = {}
        for start, end in marked_lines(data):
            found.has_mark = True
            reference = _reference(data[start:end], self.styles)
            if isinstance(reference, UnfilledRow):
                unfilled[start] = reference
            elif reference is not None:
                _, name, source_row = reference
                found.needed.setdefault(name, set()).add(source_row)
        found.unfilled = _numbered(data, unfilled)
        return found

    def fill(self, block: Block) -> FilledBlock:
        """Run the second pass over a block, when `questions` holds all that the first pass found."""
        data, filled = self.read(block), FilledBlock()
        unfilled: dict[int, UnfilledRow] = {}
        for start, end in marked_lines(data):
            line = data[start:end]
            reference = _reference(line, self.styles)
            if reference is None:
                continue
            result = reference if isinstance(reference, UnfilledRow) else self._fill(line, reference)
            if isinstance(result, UnfilledRow):
                unfilled[start] = result
                filled.edits.append((start, end, b""))
            else:
                filled.num_filled += 1
                filled.edits.append((start, end, result))
        filled.unfilled = _numbered(data, unfilled)
        return filled

    def read(self, block: Block) -> bytes:
        """Return the bytes of a block; raises `DataError` when the file has become shorter."""
        data = block.read(self.path)
        if len(data) != block.end - block.start:
            raise changed(self.path)
        return data

    def _fill(self, line: bytes, reference: Reference) -> bytes | UnfilledRow:
        row, name, source_row = reference
        found = self.questions.find(name, source_row)
        if found is None:
            return UnfilledRow(
                cause="no source row",
                got=f"row {source_row} of {name}, which is absent or has no question or no answer",
                expected="a row with a question and an answer",
                fix="check the revision",
                content=line,
            )
        filled = restore_row(row, style=self.styles[name], question=found[0], answer=found[1])
        try:
            return json.dumps(filled, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half a surrogate pair has no UTF-8 form, only an escaped one
            return json.dumps(filled).encode() + b"\n"


Reference = tuple[Mapping[str, Any], str, int]
"""A placeholder row, the name of its source, and the number of its row there."""


def marked_lines(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each line that may be a placeholder; other lines are skipped, not parsed."""
    position = 0
    while (mark := data.find(MARK, position)) >= 0:
        start = max(position, data.rfind(b"\n", position, mark) + 1)
        position = data.find(b"\n", mark) + 1 or len(data)
        yield start, position


def _numbered(data: bytes, rows: Mapping[int, UnfilledRow]) -> list[UnfilledRow]:
    """Set the line number of each row, given by the byte at which it begins; return the rows in order."""
    line, position = 1, 0
    for start, row in rows.items():
        line, position = line + data.count(b"\n", position, start), start
        row.line = line
    return list(rows.values())


def _reference(line: bytes, sources: Collection[str]) -> Reference | UnfilledRow | None:
    def unfilled(cause: str, got: str, expected: str, fix: str) -> UnfilledRow:
        return UnfilledRow(cause=cause, got=got, expected=expected, fix=fix, content=line)

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return unfilled(
            "no JSON",
            f"no JSON ({error})",
            "a JSON object",
            "download the blend again: the file is damaged or was edited",
        )
    if not isinstance(row, dict) or PLACEHOLDER not in row:
        return None
    name, reference = str(row.get("dataset")), row[PLACEHOLDER]
    if name not in sources:
        return unfilled("unknown data set", f"dataset {name}", ", ".join(sorted(sources)), "add it to --sources")
    number = reference.get("row") if isinstance(reference, dict) else None
    if type(number) is not int or not 0 <= number < MAX_ROWS:
        expected = "{row: number from 0, question_template: ...}"
        return unfilled("no row number", f"{PLACEHOLDER} {reference!r}", expected, "download the blend again")
    return row, name, number
