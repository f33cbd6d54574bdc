"""Fill a blend: restore the questions of rows that are published without them.

    python -m tools.data.fill --in blend.jsonl --out filled.jsonl [--sources configs/data/placeholders.yaml]

All other rows are copied byte for byte. Two passes read the blend on all cores: the first finds which source rows are
needed, the second writes. A row that cannot be filled is an error with its line and cause, and nothing is written; with
--allow-unfilled such rows go to filled.rejected.jsonl. The manifest holds the hash of every restored question.

What a worker does with one block of a blend: find its placeholders, then fill them. Other rows are not parsed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from recipes.errors import DataError, Problem
from recipes.files import atomic_writer, sha256_of
from tools.command_line import exit_status
from tools.data.files.manifest import TOOL_VERSION, changes, describe, lineage_of, manifest_of, write_manifest
from tools.data.files.parallel import Block, Workers, blocks_of, num_workers
from tools.data.files.row_blocks import HashedWriter, changed, count_lines, empty_line, require_file
from tools.data.placeholders import PLACEHOLDER, restore_row
from tools.data.sources import Questions, load_sources, pinned, restore, source_files
from tools.locks import only_one

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


DEFAULT_SOURCES = Path(__file__).resolve().parents[2] / "configs" / "data" / "placeholders.yaml"
MAX_SHOWN = 20  # problems printed one by one
WORTH_A_WORKER = 32  # blocks; fewer take less time than the start of a process


@dataclass(slots=True)
class UnfilledRows:
    """The rows that could not be filled: their number by cause, and the first ones, or all of them in a file."""

    path: Path
    rejected: BinaryIO | None = None
    problems: list[Problem] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, row: UnfilledRow, first_line: int) -> None:
        """Add one row, of a block that begins with line `first_line`."""
        number = first_line + row.line - 1
        self.causes[row.cause] += 1
        if self.rejected is not None:
            entry = {"line": number, "cause": row.cause, "got": row.got, "row": row.content.decode(errors="replace")}
            self.rejected.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")
        elif len(self.problems) < MAX_SHOWN:
            where = f"{self.path}:{number}"
            self.problems.append(Problem(where=where, got=row.got, expected=row.expected, fix=row.fix))

    @property
    def summary(self) -> str:
        """The number of rows by cause, as text."""
        counts = ", ".join(f"{count} x {cause}" for cause, count in sorted(self.causes.items()))
        return f"{self.causes.total()} rows cannot be filled ({counts})"

    def check(self) -> None:
        """Raise `DataError` when there are such rows and no file takes them."""
        if self.causes and self.rejected is None:
            fix = "correct them, or leave them out with --allow-unfilled"
            raise DataError([*self.problems, Problem(where=str(self.path), wrong=self.summary, fix=fix)])


@dataclass(slots=True)
class PlaceholderScan:
    """What the first pass has found, block by block."""

    blocks: list[Block] = field(default_factory=list)
    first_lines: list[int] = field(default_factory=list)
    has_mark: list[bool] = field(default_factory=list)
    needed: dict[str, set[int]] = field(default_factory=dict)
    num_rows: int = 0

    def add(self, block: Block, found: BlockPlaceholders) -> None:
        """Add the next block."""
        self.blocks.append(block)
        self.first_lines.append(self.num_rows + 1)
        self.has_mark.append(found.has_mark)
        self.num_rows += found.num_lines
        for name, rows in found.needed.items():
            self.needed.setdefault(name, set()).update(rows)


def rejected_file(output: Path) -> Path:
    """Return the file for rows that cannot be filled."""
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.rejected.jsonl")


def fill(
    blend: Path, output: Path, sources_file: Path, *, allow_moving: bool = False, allow_unfilled: bool = False
) -> dict[str, Any]:
    """Write `output` and its manifest unless they are up to date; return the manifest.

    Sources on the hub are downloaded to `sources/` beside `output`; each must be pinned to a commit unless
    `allow_moving`.
    """
    require_file(blend, fix="give --in the blend to fill")
    all_sources = load_sources(sources_file)
    blocks = list(blocks_of(blend))
    questions = Questions(output.with_name(f".{output.name}.questions"))
    rows = PlaceholderRows(blend, {name: source.style for name, source in all_sources.items()}, questions)
    count = num_workers(len(blocks), WORTH_A_WORKER)
    with only_one(output.with_name(f".{output.name}.lock")), questions, Workers(rows, count) as workers:
        with ThreadPoolExecutor(1) as beside:
            digest = beside.submit(sha256_of, blend)
            scan = _scan(workers, blocks, is_strict=not allow_unfilled)
            origin = lineage_of(manifest_of(blend))
            made_by = {"made_by": origin} if origin else {}
            blend_entry = {"file": blend.name, "sha256": digest.result(), "bytes": blend.stat().st_size, **made_by}
        needed = dict(sorted(scan.needed.items()))
        sources = {name: pinned(all_sources[name], sources_file, allow_moving=allow_moving) for name in needed}
        files = {name: source_files(source, output.parent / "sources") for name, source in sources.items()}
        known: dict[str, Any] = {
            "tool": "fill",
            "tool_version": TOOL_VERSION,
            "inputs": [
                blend_entry,
                *(describe(file, source=name) for name in files for file in files[name]),
            ],
            "parameters": {
                "sources": {name: source.as_parameters() for name, source in sources.items()},
                "unfilled": "left out" if allow_unfilled else "refused",
            },
        }
        manifest_file = manifest_of(output)
        if not (reasons := changes(manifest_file, known)):
            print(f"fill: {output} is up to date")
            return known
        output.parent.mkdir(parents=True, exist_ok=True)
        hashes = restore(questions.path, sources, files, needed)
        result = _write(workers, scan, output, allow_unfilled=allow_unfilled)
    manifest = {**known, **result, "questions": hashes}
    write_manifest(manifest_file, manifest)
    counts = result["counts"]
    print(f"fill: {output} ({', '.join(reasons)}): {counts['filled']} of {scan.num_rows} rows filled")
    return manifest


def _scan(workers: Workers[PlaceholderRows], blocks: Sequence[Block], *, is_strict: bool) -> PlaceholderScan:
    """Run the first pass: find the placeholders and the source rows they need; raises `DataError` for wrong ones."""
    blend = workers.work.path
    scan, unfilled = PlaceholderScan(), UnfilledRows(blend)
    for block, found in zip(blocks, workers.map(PlaceholderRows.find, blocks), strict=True):
        if found.empty_line is not None:
            raise DataError(empty_line(blend, scan.num_rows + found.empty_line))
        for row in found.unfilled if is_strict else ():
            unfilled.add(row, scan.num_rows + 1)
        scan.add(block, found)
    unfilled.check()
    return scan


def _write(
    workers: Workers[PlaceholderRows], scan: PlaceholderScan, output: Path, *, allow_unfilled: bool
) -> dict[str, Any]:
    """Run the second pass: write the filled blend and the rejected rows; return counts and outputs of the manifest."""
    rows, num_filled = workers.work, 0
    rejected_path = rejected_file(output)
    with ExitStack() as stack:
        rejected = stack.enter_context(atomic_writer(rejected_path))  # an empty file is removed at the end
        unfilled = UnfilledRows(rows.path, rejected if allow_unfilled else None)
        writer = stack.enter_context(HashedWriter.open(output))
        with_marks = [block for block, has_mark in zip(scan.blocks, scan.has_mark, strict=True) if has_mark]
        filled_blocks = workers.map(PlaceholderRows.fill, with_marks)
        for block, first_line, has_mark in zip(scan.blocks, scan.first_lines, scan.has_mark, strict=True):
            data = rows.read(block)
            if has_mark:
                filled = next(filled_blocks)
                data = filled.applied(data)
                num_filled += filled.num_filled
                for row in filled.unfilled:
                    unfilled.add(row, first_line)
            writer.write(data)
        unfilled.check()
    counts = {"rows": scan.num_rows, "filled": num_filled, "rejected": dict(sorted(unfilled.causes.items()))}
    outputs = [writer.as_output(output, rows=scan.num_rows - unfilled.causes.total())]
    if unfilled.causes:
        print(f"fill: {rejected_path}: {unfilled.summary}")
        outputs.append(describe(rejected_path, rows=unfilled.causes.total()))
    else:
        rejected_path.unlink(missing_ok=True)
    return {"counts": counts, "outputs": outputs}


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.fill", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--in", dest="blend", type=Path, required=True, help="blend with placeholder rows")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--sources", type=Path, default=DEFAULT_SOURCES, help="table of data sets with the questions")
    parser.add_argument(
        "--allow-moving-revision",
        action="store_true",
        help="accept a branch of a source, and record its commit",
    )
    parser.add_argument(
        "--allow-unfilled", action="store_true", help="write rows that cannot be filled to OUT.rejected.jsonl"
    )
    options = parser.parse_args(arguments)
    fill(
        options.blend,
        options.out,
        options.sources,
        allow_moving=options.allow_moving_revision,
        allow_unfilled=options.allow_unfilled,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
