"""Make what SCALE=tiny needs: data/tiny with its splits and manifest, and the SFT checkpoint models/tiny-sft.

    python -m tools.tiny.prepare --data data [--models models] [--seed 42] [--blend wide]

With `--blend wide` also the rows of the wide blend, of stage 2.1 and of stage 3, and in place of models/tiny-sft the
checkpoint models/tiny-wide-sft, whose warm-up has all of them.

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
from tools.tiny.blends import RLHF, RLVR, SWE1, WIDE, TinyBlend
from tools.tiny.make_blend import MATH_AGENT, SOURCES, make_blend
from tools.tiny.sft import SftSettings, make_sft_checkpoint, wide_settings
from tools.tiny.tool_tasks import OFFICE, write_office

CHECKPOINT, WIDE_CHECKPOINT = "tiny-sft", "tiny-wide-sft"
OF_WIDE = (RLVR, WIDE, SWE1, RLHF)


def prepare_data(data: Path, *, seed: int, blend: TinyBlend = RLVR) -> Path:
    """Make the splits of a tiny blend; return their directory."""
    directory = data / blend.name
    raw, filled = directory / "raw", directory / "raw" / "filled.jsonl"
    made = make_blend(raw, num_rows=blend.train_rows + blend.val_rows, seed=seed, tasks=blend.tasks)
    if any(task.agent == MATH_AGENT for task in blend.tasks):
        fill(made, filled, raw / SOURCES)
        made = filled
    split(made, directory, val_rows=blend.val_rows)
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
    parser.add_argument("--models", type=Path, help="directory to write the checkpoint to; default: make only the data")
    parser.add_argument("--seed", type=int, default=42, help="of the rows, the conversations and the weights")
    parser.add_argument(
        "--blend", default="", choices=("", "tiny", "wide"), help="wide: all tiny rows, tools and judges too"
    )
    options = parser.parse_args(arguments)
    is_wide = options.blend == "wide"
    with only_one(options.data / ".prepare.lock"):
        blends = OF_WIDE if is_wide else (RLVR,)
        splits = [prepare_data(options.data, seed=options.seed, blend=blend) for blend in blends]
        if is_wide:
            write_office(options.data / Path(OFFICE).name)
        if options.models:
            held_out = frozenset().union(*(prompts_of(directory / VALIDATION) for directory in splits))
            name = WIDE_CHECKPOINT if is_wide else CHECKPOINT
            settings = wide_settings(seed=options.seed) if is_wide else SftSettings(seed=options.seed)
            make_sft_checkpoint(options.models / name, settings, held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
