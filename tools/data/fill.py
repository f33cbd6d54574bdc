"""Fill a blend: restore the questions of rows that are published without them.

    python -m tools.data.fill --in blend.jsonl --out filled.jsonl [--sources configs/data/placeholders.yaml]

All other rows are copied byte for byte. Two passes read the blend on all cores: the first finds which source rows are
needed, the second writes. A row that cannot be filled is an error with its line and cause, and nothing is written; with
--allow-unfilled such rows go to filled.rejected.jsonl. The manifest holds the hash of every restored question.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from recipes.errors import DataError, Problem
from recipes.files import atomic_writer, sha256_of
from tools.command_line import exit_status
from tools.data.fill_rows import BlockPlaceholders, PlaceholderRows, UnfilledRow
from tools.data.questions import Questions, restore
from tools.data.sources import load_sources, pinned, source_files
from tools.files.locks import only_one
from tools.files.manifest import TOOL_VERSION, changes, describe, lineage_of, manifest_of, write_manifest
from tools.files.parallel import Block, Workers, blocks_of, num_workers
from tools.files.row_files import HashedWriter, empty_line, require_file

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
