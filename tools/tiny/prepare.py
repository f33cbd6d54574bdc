"""Make what SCALE=tiny needs: data/tiny with its splits and manifest, and the SFT checkpoint models/tiny-sft.

    python -m tools.tiny.prepare --data data [--models models] [--seed 42]

Makes only what is missing or out of date. The rows are filled and split by the tools that the published blends use.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.command_line import exit_status
from tools.data.fill import fill
from tools.data.split import VALIDATION, split
from tools.files.locks import only_one
from tools.tiny.make_blend import SOURCES, make_blend
from tools.tiny.sft import SftSettings, make_sft_checkpoint

TRAIN_ROWS = 1920  # an epoch of 120 steps with 16 prompts each
VAL_ROWS = 200
CHECKPOINT = "tiny-sft"


def prepare_data(data: Path, *, seed: int) -> Path:
    """Make the splits of the tiny blend; return their directory."""
    directory = data / "tiny"
    raw, filled = directory / "raw", directory / "raw" / "filled.jsonl"
    blend = make_blend(raw, num_rows=TRAIN_ROWS + VAL_ROWS, seed=seed)
    fill(blend, filled, raw / SOURCES)
    split(filled, directory, val_rows=VAL_ROWS)
    return directory


def prompts_of(rows_file: Path) -> frozenset[str]:
    """Return the user messages of a split."""
    rows = map(json.loads, rows_file.read_text(encoding="utf-8").splitlines())
    return frozenset(row["responses_create_params"]["input"][-1]["content"] for row in rows)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.prepare", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="directory to write tiny/ to")
    parser.add_argument("--models", type=Path, help=f"directory to write {CHECKPOINT}/ to; default: make only the data")
    parser.add_argument("--seed", type=int, default=42, help="of the rows, the conversations and the weights")
    options = parser.parse_args(arguments)
    with only_one(options.data / ".prepare.lock"):
        directory = prepare_data(options.data, seed=options.seed)
        if options.models:
            held_out = prompts_of(directory / VALIDATION)
            make_sft_checkpoint(options.models / CHECKPOINT, SftSettings(seed=options.seed), held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
