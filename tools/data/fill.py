"""Restore the rows of a blend that are shipped without their question.

    python -m tools.data.fill --in blend.jsonl --out filled.jsonl [--sources configs/data/placeholders.yaml]

Other rows pass through byte for byte. The blend is streamed twice: once to learn which source rows are needed, once
to write. A row that cannot be filled is an error with its line and cause, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.grpo.errors import DataError, InputError, Problem
from tools.data.files import atomic_writer, read_lines, require_file
from tools.data.manifest import TOOL_VERSION, changes, describe, manifest_of, read_manifest, write_manifest
from tools.data.placeholders import PLACEHOLDER, nested, restore_answer, restore_row
from tools.data.sources import Source, load_sources, pinned, read_records, source_files

DEFAULT_SOURCES = Path(__file__).resolve().parents[2] / "configs" / "data" / "placeholders.yaml"
MAX_SHOWN = 20  # problems printed one by one
MARK = PLACEHOLDER.encode()

Restored = Mapping[str, Mapping[int, tuple[str, str]]]
"""Per data set name, per source row: (question, answer)."""


@dataclass(slots=True)
class Faults:
    """What could not be filled: each with its place, and how many of each cause."""

    path: Path
    problems: list[Problem] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, cause: str, *, got: str, expected: str, fix: str) -> None:
        """Note one row that cannot be filled."""
        self.causes[cause] += 1
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(Problem(where=f"{self.path}:{number}", got=got, expected=expected, fix=fix))

    def check(self) -> None:
        """Raise `DataError` when there are any."""
        if not self.causes:
            return
        counts = ", ".join(f"{count} x {cause}" for cause, count in sorted(self.causes.items()))
        total = sum(self.causes.values())
        summary = Problem(
            where=str(self.path), got=f"{total} rows that cannot be filled ({counts})", expected="none", fix="see above"
        )
        raise DataError([*self.problems, summary])


def fill(blend: Path, output: Path, sources_file: Path, *, allow_moving: bool = False) -> dict[str, Any]:
    """Write `output` and its manifest unless they are up to date; return the manifest.

    Sources on the hub are brought to `sources/` beside `output`, and must be pinned unless `allow_moving`.
    """
    require_file(blend, fix="give --in the blend to fill")
    sources = load_sources(sources_file)
    needed = _needed_rows(blend, sources)
    sources = {name: pinned(sources[name], sources_file, allow_moving=allow_moving) for name in sorted(needed)}
    files = {name: source_files(source, output.parent / "sources") for name, source in sources.items()}
    origin = read_manifest(manifest_of(blend))
    manifest_file = manifest_of(output)
    known: dict[str, Any] = {
        "tool": "fill",
        "tool_version": TOOL_VERSION,
        "inputs": [
            describe(blend, **({"made_by": origin} if origin else {})),
            *(describe(file, source=name) for name in sorted(files) for file in files[name]),
        ],
        "parameters": {"sources": {name: sources[name].as_parameters() for name in sorted(needed)}},
    }
    reasons = changes(manifest_file, known)
    if not reasons:
        print(f"fill: {output} is up to date")
        return known
    restored = {name: _restore(sources[name], files[name], rows) for name, rows in needed.items()}
    counts = _write(blend, output, sources, restored)
    manifest = {**known, "counts": dict(counts), "outputs": [describe(output, rows=counts["rows"])]}
    write_manifest(manifest_file, manifest)
    print(f"fill: {output} ({', '.join(reasons)}): {counts['filled']} of {counts['rows']} rows filled")
    return manifest


def _placeholders(blend: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield (line number, line, row), the row only where it is a placeholder."""
    for number, line in read_lines(blend):
        row = None
        if MARK in line:  # a cheap test first: most rows are none
            try:
                row = json.loads(line)
            except ValueError as error:
                fix = "the file is damaged or was edited; get it again"
                problem = Problem(where=f"{blend}:{number}", got=f"no JSON ({error})", expected="one object", fix=fix)
                raise DataError(problem) from error
            row = row if isinstance(row, dict) and PLACEHOLDER in row else None
        yield number, line, row


def _needed_rows(blend: Path, sources: Mapping[str, Source]) -> dict[str, set[int]]:
    """Return which rows of which source the blend refers to; raises `DataError` for references that make no sense."""
    needed: dict[str, set[int]] = {}
    faults = Faults(blend)
    for number, _, row in _placeholders(blend):
        if row is None:
            continue
        name, reference = str(row.get("dataset")), row[PLACEHOLDER]
        if name not in sources:
            known = ", ".join(sources)
            faults.add(number, "unknown data set", got=f"dataset {name}", expected=known, fix="add it to --sources")
        elif not isinstance(reference, dict) or type(reference.get("row")) is not int or reference["row"] < 0:
            got, expected = f"{PLACEHOLDER} {reference!r}", "{row: number from 0, question_template: ...}"
            faults.add(number, "no row number", got=got, expected=expected, fix="get the blend again")
        else:
            needed.setdefault(name, set()).add(reference["row"])
    faults.check()
    return needed


def _restore(source: Source, files: Sequence[Path], rows: set[int]) -> dict[int, tuple[str, str]]:
    """Return question and answer of each row that has both."""
    restored = {}
    for row, record in read_records(source, files, rows):
        question, answer = nested(record, source.question), restore_answer(nested(record, source.answer))
        if isinstance(question, str) and question and answer:
            restored[row] = (question, answer)
    return restored


def _write(blend: Path, output: Path, sources: Mapping[str, Source], restored: Restored) -> Counter[str]:
    counts: Counter[str] = Counter(rows=0, filled=0)
    faults = Faults(blend)
    with atomic_writer(output) as file:
        for number, line, row in _placeholders(blend):
            counts["rows"] += 1
            if row is None:
                file.write(line)
                continue
            name, source_row = row["dataset"], row[PLACEHOLDER]["row"]
            if source_row not in restored[name]:
                got = f"row {source_row} of {name}, which is not there or has no question or answer"
                faults.add(number, "no source row", got=got, expected="a row with both", fix="check the revision")
                continue
            question, answer = restored[name][source_row]
            filled = restore_row(row, style=sources[name].style, question=question, answer=answer)
            file.write(json.dumps(filled, ensure_ascii=False).encode() + b"\n")
            counts["filled"] += 1
        faults.check()
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.fill", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--in", dest="blend", type=Path, required=True, help="blend with placeholder rows")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--sources", type=Path, default=DEFAULT_SOURCES, help="where the questions come from")
    parser.add_argument(
        "--allow-moving-revision", action="store_true", help="follow a branch of a source, and record its commit"
    )
    options = parser.parse_args(arguments)
    try:
        fill(options.blend, options.out, options.sources, allow_moving=options.allow_moving_revision)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
