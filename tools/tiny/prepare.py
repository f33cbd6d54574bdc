"""Make what SCALE=tiny needs: data/tiny with its splits and manifest, and the SFT checkpoint models/tiny-sft.

    python -m tools.tiny.prepare --data data [--models models] [--seed 42] [--blend wide] [--model nemotron-h]

With `--blend wide` also the rows of the wide blend and of stages 2.1, 2.2 and 3, the images of stage 2.2, and in place
of models/tiny-sft the checkpoint models/tiny-wide-sft, whose warm-up has all of them. With `--model nemotron-h` the
checkpoint is that of a tiny Nemotron-H with experts, and its name begins with tiny-nemotron-h.

Makes only what is missing or out of date. The rows are filled and split by the tools that the published blends use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from recipes.environments.swe.containers.runtime import runtime_of_machine
from tools.command_line import exit_status
from tools.data.fill import fill
from tools.data.split import TRAIN, VALIDATION, split
from tools.files.locks import only_one
from tools.planning.stage_env import TINY_IMAGES
from tools.tiny.blends import RLHF, RLVR, SWE1, SWE2, WIDE, TinyBlend
from tools.tiny.make_blend import MATH_AGENT, SOURCES, make_blend
from tools.tiny.model import BUILDERS
from tools.tiny.repository_tasks import repositories_in
from tools.tiny.sft import SftSettings, make_sft_checkpoint, wide_settings
from tools.tiny.task_images import make_images
from tools.tiny.tool_tasks import OFFICE, write_office

# Name of a blend -> the rows to make, the name of the checkpoint, the settings of its warm-up.
MADE: dict[str, tuple[tuple[TinyBlend, ...], str, Callable[..., SftSettings]]] = {
    "tiny": ((RLVR,), "tiny-sft", SftSettings),
    "wide": ((RLVR, WIDE, SWE1, SWE2, RLHF), "tiny-wide-sft", wide_settings),
}


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
    """Return the user messages of a split, or the problems of its repositories."""
    requests = [json.loads(line)["responses_create_params"] for line in rows_file.read_text("utf-8").splitlines()]
    return frozenset(
        request["input"][-1]["content"] if request["input"] else request["metadata"]["problem_statement"]
        for request in requests
    )


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.prepare", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="directory to write tiny/ to")
    parser.add_argument("--models", type=Path, help="directory to write the checkpoint to; default: make only the data")
    parser.add_argument("--seed", type=int, default=42, help="of the rows, the conversations and the weights")
    about = "wide: tools, judges, repositories and preferences, too"
    parser.add_argument("--blend", default="", choices=("", *MADE), help=about)
    parser.add_argument("--model", default="qwen3", choices=BUILDERS, help="family of the checkpoint")
    about = "make nothing on a machine that cannot run the containers of stage 2.2"
    parser.add_argument("--with-containers", action="store_true", help=about)
    options = parser.parse_args(arguments)
    if options.with_containers:
        runtime_of_machine()
    blends, checkpoint, settings = MADE[options.blend or "tiny"]
    with only_one(options.data / ".prepare.lock"):
        splits = [prepare_data(options.data, seed=options.seed, blend=blend) for blend in blends]
        if WIDE in blends:
            write_office(options.data / Path(OFFICE).name)
        if SWE2 in blends:
            place = options.data / SWE2.name
            made = (*repositories_in(place / TRAIN), *repositories_in(place / VALIDATION))
            make_images(place / TINY_IMAGES, made)
        if options.models:
            held_out = frozenset().union(*(prompts_of(directory / VALIDATION) for directory in splits))
            name = checkpoint if options.model == "qwen3" else checkpoint.replace("tiny", f"tiny-{options.model}")
            own = settings(seed=options.seed, model=options.model)
            make_sft_checkpoint(options.models / name, own, held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
