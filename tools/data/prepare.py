"""Make one blend ready to train on: download it, fill it, edit it, split it, and download its verifiers' side files.

    python -m tools.data.prepare --blend rlvr1 --data data [--val-rows 100] [--test-rows 0] [--sample ROWS]
                                 [--stratify agent] [--allow-unfilled] [--as-published] [--tokenizer DIR]

Each step writes a manifest and does nothing when nothing changed, so the same command resumes after a kill.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from recipes.errors import DataError, Problem
from recipes.files import atomic_writer
from recipes.retry import RetryPolicy
from tools.command_line import exit_status, positive
from tools.data.blends import BLENDS_FILE, Blend
from tools.data.curriculum.write import DEFAULT_SETTINGS, control_reasoning, load_settings
from tools.data.download import download, find_blend
from tools.data.files.manifest import TOOL_VERSION, changes, describe, lineage_of, manifest_of, write_manifest
from tools.data.fill import DEFAULT_SOURCES, fill
from tools.data.side_files import SIDE_FILES, fetch, load_side_files
from tools.data.split import DEFAULT_VAL_ROWS, split
from tools.locks import only_one


def prepare(options: argparse.Namespace) -> Path:
    """Run every step; return the directory of the splits."""
    policy = RetryPolicy(first_seconds=options.back_off)
    blend = find_blend(options.blend, options.blends, options.revision)
    if sum(name.endswith(".jsonl") for name in blend.files) != 1:
        where, got = f"{options.blends}: {blend.name}.files", ", ".join(blend.files)
        fix = "make one blend of each file"
        raise DataError(Problem(where=where, got=got, expected="one file of rows (.jsonl)", fix=fix))
    whole: Path = options.data / options.blend
    directory = whole.with_name(f"{whole.name}-sample{options.sample}") if options.sample else whole
    with only_one(whole / ".prepare.lock"):
        files = download(blend, blend.dataset_called(options.dataset), whole / "raw", policy)
        rows = next(file for file in files if file.suffix == ".jsonl")
        if options.sample:
            rows = sample(rows, directory / "raw" / rows.name, options.sample)
        filled = directory / "raw" / "filled.jsonl"
        fill(
            rows,
            filled,
            options.sources,
            allow_moving=options.allow_moving_revision,
            allow_unfilled=options.allow_unfilled,
        )
        if blend.reasoning and not options.as_published:
            settings, edited = reasoning_settings(blend), filled.with_name("controlled.jsonl")
            filled = control_reasoning(filled, edited, settings, options.tokenizer)
        split(
            filled,
            directory,
            val_rows=options.val_rows,
            test_rows=options.test_rows,
            stratify=options.stratify is not None,
        )
        for side in load_side_files(options.side_files).values():
            if options.blend in side.blends:
                fetch(side, options.data / "side_files", policy)
    return directory


def reasoning_settings(blend: Blend) -> dict[str, Any]:
    """Return the settings of a curriculum with the shares of a blend."""
    return load_settings(DEFAULT_SETTINGS, [f"reasoning.{name}={share}" for name, share in blend.reasoning.items()])


def sample(rows: Path, out: Path, count: int) -> Path:
    """Write the first rows of a file, for a quick trial, unless they are there; return where they are."""
    manifest_file = manifest_of(out)
    origin = lineage_of(manifest_of(rows))
    known = {
        "tool": "sample",
        "tool_version": TOOL_VERSION,
        "parameters": {"rows": count},
        "inputs": [describe(rows, **({"made_by": origin} if origin else {}))],
    }
    if reasons := changes(manifest_file, known):
        with rows.open("rb") as lines, atomic_writer(out) as file:
            file.writelines(itertools.islice(lines, count))
        write_manifest(manifest_file, {**known, "outputs": [describe(out)]})
        print(f"sample: {out} ({', '.join(reasons)}): the first {count} rows")
    return out


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.data.prepare", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blend", required=True, help="name in the blends file, e.g. rlvr1")
    parser.add_argument("--data", type=Path, required=True, help="directory to write BLEND/ to")
    parser.add_argument(
        "--val-rows", type=positive, default=DEFAULT_VAL_ROWS, help="number of the last rows to hold out"
    )
    parser.add_argument("--test-rows", type=positive, default=0, help="rows before those to hold out as well")
    parser.add_argument("--sample", type=positive, metavar="ROWS", help="only the first rows, to BLEND-sampleROWS/")
    parser.add_argument("--stratify", choices=["agent"], help="hold out the last rows of each agent, in proportion")
    parser.add_argument("--dataset", help="name of the data set on the hub; both published names are accepted")
    parser.add_argument("--revision", help="commit of the data set, instead of the one in the blends file")
    parser.add_argument("--allow-unfilled", action="store_true", help="leave out rows that cannot be filled")
    parser.add_argument("--as-published", action="store_true", help="leave the reasoning of all rows as it is")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory, to count reasoning budgets")
    parser.add_argument("--allow-moving-revision", action="store_true", help="accept branches of question sources")
    parser.add_argument(
        "--back-off", type=float, default=RetryPolicy().first_seconds, help="seconds before the first retry"
    )
    for name, default in (("blends", BLENDS_FILE), ("sources", DEFAULT_SOURCES), ("side-files", SIDE_FILES)):
        parser.add_argument(
            f"--{name}", type=Path, default=default, help=f"table to use instead of configs/data/{default.name}"
        )
    directory = prepare(parser.parse_args(arguments))
    print(f"prepare: {directory} is ready; `make data-validate` checks every row")
    return 0


if __name__ == "__main__":
    sys.exit(main())
