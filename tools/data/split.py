"""Split a blend: the last rows are validation, the order is kept.

    python -m tools.data.split --in filled.jsonl --out-dir data/rlvr1 [--val-rows 100]

Writes what `head -n -100` and `tail -n 100` would, as train-split.jsonl and val-split.jsonl, and manifest.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, BinaryIO

from recipes.grpo.errors import DataError, InputError, Problem
from tools.data.files import CHUNK, atomic_writer, empty_line, require_file
from tools.data.manifest import TOOL_VERSION, changes, describe, read_manifest, write_manifest

TRAIN, VALIDATION = "train-split.jsonl", "val-split.jsonl"
DEFAULT_VAL_ROWS = 100


def split(rows_file: Path, out_dir: Path, *, val_rows: int = DEFAULT_VAL_ROWS) -> dict[str, Any]:
    """Write both splits and the manifest unless they are up to date; return the manifest."""
    require_file(rows_file, fix="give --in the filled blend")
    if val_rows < 1:
        raise DataError(
            Problem(where="--val-rows", got=str(val_rows), expected="1 or more", fix="choose how many rows")
        )
    manifest_file = out_dir / "manifest.json"
    source = describe(rows_file)
    if made_by := read_manifest(rows_file.with_name(rows_file.name + ".manifest.json")):
        source["made_by"] = made_by
    known = {
        "tool": "split",
        "tool_version": TOOL_VERSION,
        "inputs": [source],
        "parameters": {"val_rows": val_rows, "validation": "last rows"},
    }
    reasons = changes(manifest_file, known)
    if not reasons:
        print(f"split: {out_dir} is up to date")
        return read_manifest(manifest_file) or known
    total, cut = _find_cut(rows_file, val_rows)
    if total <= val_rows:
        got, expected = f"{total} rows", f"more than the {val_rows} that are held out for validation"
        raise DataError(Problem(where=str(rows_file), got=got, expected=expected, fix="lower --val-rows"))
    manifest_file.unlink(missing_ok=True)  # without it, what is there does not count as complete
    with rows_file.open("rb") as rows:
        _copy(rows, out_dir / TRAIN, cut)
        _copy(rows, out_dir / VALIDATION, rows_file.stat().st_size - cut)
    outputs = [describe(out_dir / TRAIN, rows=total - val_rows), describe(out_dir / VALIDATION, rows=val_rows)]
    manifest = {**known, "outputs": outputs}
    write_manifest(manifest_file, manifest)
    print(f"split: {out_dir} ({', '.join(reasons)}): {total - val_rows} rows to train on, {val_rows} to validate")
    return manifest


def _find_cut(path: Path, val_rows: int) -> tuple[int, int]:
    """Return the number of rows and the byte at which the last `val_rows` begin; raises at an empty line."""
    total, offset = 0, 0
    starts = [0] * val_rows  # ring buffer: where each of the last rows begins
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                raise DataError(empty_line(path, total + 1))
            starts[total % val_rows] = offset
            total, offset = total + 1, offset + len(line)
    return total, starts[total % val_rows]


def _copy(source: BinaryIO, path: Path, size: int) -> None:
    with atomic_writer(path) as file:
        while size:
            chunk = source.read(min(size, CHUNK))
            if not chunk:
                raise DataError(
                    Problem(where=path.name, got="an input that became shorter", expected="no change", fix="rerun")
                )
            file.write(chunk)
            size -= len(chunk)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.split", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--in", dest="rows", type=Path, required=True, help="JSONL file without placeholders")
    parser.add_argument("--out-dir", type=Path, required=True, help="directory of the two splits")
    parser.add_argument("--val-rows", type=int, default=DEFAULT_VAL_ROWS, help="rows held out, from the end")
    options = parser.parse_args(arguments)
    try:
        split(options.rows, options.out_dir, val_rows=options.val_rows)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
