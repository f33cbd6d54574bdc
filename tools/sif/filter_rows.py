"""Copy the rows to train on: those of instances whose images are good, and those that need no image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem
from tools.files.manifest import TOOL_VERSION, changes, describe, lineage_of, write_manifest
from tools.files.row_files import HashedWriter
from tools.sif.names import instance_of

MANIFEST = "manifest.json"


def require_place(rows: Sequence[Path], out: Path) -> None:
    """Raise `DataError` where a copy would overwrite a row file or another copy."""
    if same := [path for path in rows if path.resolve().parent == out.resolve()]:
        wrong = f"the copies would overwrite the rows in the directory of {same[0]}"
        raise DataError(Problem(where="--out", wrong=wrong, fix="name another directory"))
    names = [path.name for path in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        problem = Problem(
            where="--rows",
            got=f"{twice[0]} twice",
            expected="files of different names",
            fix="run it once for each file",
        )
        raise DataError(problem)


def write_good_rows(rows: Sequence[Path], good: set[str], out: Path, *, good_list: Path) -> None:
    """Copy the row files without the rows of other instances, byte by byte, and write a manifest.

    Copies that are up to date stay.

    `good_list` is the list of all good instances; `good` are those of these rows.
    """
    inputs: list[dict[str, Any]] = [describe(good_list)]
    for path in rows:
        origin = lineage_of(path.with_name(MANIFEST))
        inputs.append(describe(path, **({"made_by": origin} if origin else {})))
    known = {"tool": "sif-check", "tool_version": TOOL_VERSION, "inputs": inputs, "parameters": {}}
    if not (reasons := changes(out / MANIFEST, known)):
        print(f"sif-check: {out} is up to date")
        return
    outputs, counts = [], {}
    for path in rows:
        kept = dropped = 0
        with path.open("rb") as lines, HashedWriter.open(out / path.name) as file:
            for line in lines:
                instance = instance_of(line)
                if instance is None or instance in good:
                    file.write(line)
                    kept += 1
                else:
                    dropped += 1
        outputs.append(file.as_output(out / path.name, rows=kept))
        counts[path.name] = {"rows": kept, "left_out": dropped}
        print(f"sif-check: {out / path.name} ({', '.join(reasons)}): {kept} rows, {dropped} left out")
    write_manifest(out / MANIFEST, {**known, "counts": counts, "outputs": outputs})
