"""Make what SCALE=tiny needs: data/tiny with its splits and manifest, and the SFT checkpoint of a tiny model.

    python -m tools.tiny.prepare --data data [--models models] [--seed 42] [--blend wide] [--model nemotron-h]

With `--blend wide` also the rows of the wide blend and of stages 2.1, 2.2 and 3, the images of stage 2.2, and in place
of models/tiny-nemotron-h-sft the checkpoint models/tiny-wide-sft, whose warm-up has all of them: that of a Qwen3, for
the warm-up is long. `--model` chooses another family: models/tiny-MODEL-sft, with the wide blend tiny-MODEL-wide-sft.
`--model smollm2` fetches a real language model, models/smollm2, and makes rows that it can solve, data/english.
With `--blend tools` the rows and the checkpoint of Nano's stages: one that also calls tools, some of them not there.
With `--blend teachers` the student of `make mopd` and its three teachers, models/tiny-teacher-....
With `--stages` whatever these need one after the other, and with stage 2.2 nothing where no container can run.
Beside the Nemotron-H there is one with multi-token heads, models/tiny-nemotron-h-heads-sft, which stage 4 starts from.

Makes only what is missing or out of date. The rows are filled and split by the tools that the published blends use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.config.load import Stage
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.errors import DataError, Problem
from recipes.files import write_atomically
from tools.command_line import exit_status
from tools.data.blends import BLENDS_FILE, load_blends
from tools.data.curriculum.write import control_reasoning
from tools.data.files.row_blocks import TRAIN, VALIDATION
from tools.data.fill import fill
from tools.data.prepare import reasoning_settings
from tools.data.split import split
from tools.draft.launch import (
    HEADS_MODEL,
    OF_WIDE,
    TEACHERS,
    TINY_IMAGES,
    TINY_MODEL,
    TOOLS_MODEL,
    WIDE_MODEL,
    chosen_stages,
)
from tools.locks import only_one
from tools.tiny import from_gguf
from tools.tiny.heads import make_with_heads
from tools.tiny.make_blend import ENGLISH, RLHF, RLVR, SOURCES, SWE1, SWE2, TOOLS, WIDE, TinyBlend, make_blend
from tools.tiny.model import BUILDERS
from tools.tiny.repositories import repositories_in
from tools.tiny.sft import SftSettings, make_sft_checkpoint, teacher_settings, tools_settings, wide_settings
from tools.tiny.task_images import make_images
from tools.tiny.tasks import TASKS, TinyTask
from tools.tiny.tool_tasks import OFFICE, write_office

NANO = "tiny-nano"  # the rows of `make nano-rl SCALE=tiny`
SMOLLM2 = "smollm2"  # the model that is fetched, not made
# Name of a blend -> the rows to make, the settings of its warm-up, the family of its checkpoint.
MADE: dict[str, tuple[tuple[TinyBlend, ...], Callable[..., SftSettings], str]] = {
    "wide": ((RLVR, WIDE, SWE1, SWE2, RLHF), wide_settings, "qwen3"),
    "tiny": ((RLVR,), SftSettings, "nemotron-h"),
    "teachers": ((RLVR,), SftSettings, "nemotron-h"),
    "tools": ((RLVR, TOOLS), tools_settings, "nemotron-h"),
}
NEEDS = {"healing": "tiny", "distillation": "teachers", "nano3-grpo": "tools", "nano3-dpo": "tools"}  # stage -> blend
TAUGHT_DATA = "tiny-taught"  # the rows of `make mopd`
TAUGHT: dict[str, TinyTask] = {"math": TASKS[0], "puzzles": TASKS[2], "records": TASKS[3]}  # by the teacher's name


def checkpoint_name(blend: str, model: str) -> str:
    """Return the directory of a checkpoint; that of the chain, which all its stages name, goes without its family."""
    if (name := {"wide": WIDE_MODEL, "tools": TOOLS_MODEL}.get(blend)) is not None:
        return Path(name).name if model == MADE[blend][2] else f"tiny-{model}-{blend}-sft"
    return f"tiny-{model}-sft"


def prepare_data(data: Path, *, seed: int, blend: TinyBlend = RLVR) -> Path:
    """Make the splits of a tiny blend; return their directory."""
    directory = data / blend.name
    raw, filled = directory / "raw", directory / "raw" / "filled.jsonl"
    made = make_blend(raw, num_rows=blend.train_rows + blend.val_rows, seed=seed, tasks=blend.tasks)
    if any(task.is_hidden for task in blend.tasks):
        fill(made, filled, raw / SOURCES)
        made = filled
    split(made, directory, val_rows=blend.val_rows)
    return directory


def prepare_nano(data: Path) -> None:
    """Make the splits of Nano's tiny blend: the rows of the tiny one, with the edits of the published blend."""
    directory, published = data / NANO, load_blends(BLENDS_FILE)[NANO.removeprefix("tiny-")]
    rows = data / RLVR.name / "raw" / "filled.jsonl"
    edited = control_reasoning(rows, directory / "raw" / "controlled.jsonl", reasoning_settings(published), None)
    split(edited, directory, val_rows=RLVR.val_rows)


def prepare_taught(data: Path) -> None:
    """Make the splits of distillation: the rows of the tiny blend that a teacher knows."""
    directory, rows = data / TAUGHT_DATA, (data / RLVR.name / "raw" / "filled.jsonl").read_bytes().splitlines(True)
    known = {task.agent for task in TAUGHT.values()}
    kept = [row for row in rows if json.loads(row)["agent_ref"]["name"] in known]
    write_atomically(directory / "raw" / "kept.jsonl", b"".join(kept))
    split(directory / "raw" / "kept.jsonl", directory, val_rows=RLVR.val_rows * len(known) // len(TASKS))


def prompts_of(rows_file: Path) -> frozenset[str]:
    """Return the user messages of a split, or the problems of its repositories."""
    requests = [json.loads(line)["responses_create_params"] for line in rows_file.read_bytes().splitlines()]
    return frozenset(
        request["input"][-1]["content"] if request["input"] else request["metadata"]["problem_statement"]
        for request in requests
    )


def blends_of(stages: Sequence[Stage], *, is_wide: bool) -> list[str]:
    """Return the blends whose rows and checkpoints these stages need when they run one after the other."""
    is_long = is_wide or any(stage.name in OF_WIDE for stage in stages)
    needed = {NEEDS.get(stage.name, "wide" if is_long else "tiny") for stage in stages}
    return [blend for blend in MADE if blend in needed]


def make_all(blend: str, model: str, options: argparse.Namespace) -> None:
    """Make the rows of a blend, its images, and the checkpoints that its stages start from."""
    blends, settings, default = MADE[blend]
    model = model or default
    splits = [prepare_data(options.data, seed=options.seed, blend=one) for one in blends]
    if RLVR in blends:
        prepare_nano(options.data)
    if WIDE in blends:
        write_office(options.data / Path(OFFICE).name)
    if SWE2 in blends:
        place = options.data / SWE2.name
        repositories = (*repositories_in(place / TRAIN), *repositories_in(place / VALIDATION))
        make_images(place / TINY_IMAGES, repositories)
    if not options.models:
        return
    held_out = frozenset().union(*(prompts_of(directory / VALIDATION) for directory in splits))
    made = options.models / checkpoint_name(blend, model)
    make_sft_checkpoint(made, settings(seed=options.seed, model=model), held_out)
    if made.name == Path(TINY_MODEL).name:
        make_with_heads(made.with_name(Path(HEADS_MODEL).name), made)
    if blend == "teachers":
        prepare_taught(options.data)
        for name, task in TAUGHT.items():
            own = teacher_settings(seed=options.seed, start=made, task=task)
            make_sft_checkpoint(made.with_name(f"{Path(TEACHERS).name}{name}"), own, held_out)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny.prepare", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="directory to write tiny/ to")
    parser.add_argument("--models", type=Path, help="directory to write the checkpoint to; default: make only the data")
    parser.add_argument("--seed", type=int, default=42, help="of the rows, the conversations and the weights")
    about = "wide: tools, judges, repositories and preferences, too; tools: what Nano starts from; teachers: of mopd"
    parser.add_argument("--blend", default="", choices=("", *MADE), help=about)
    parser.add_argument("--model", default="", choices=("", *BUILDERS, SMOLLM2), help="family of the checkpoint")
    about = "make what these stages need one after the other; empty: those of a pipeline without STAGES"
    parser.add_argument("--stages", help=about)
    options = parser.parse_args(arguments)
    blends = [options.blend or "tiny"]
    if options.stages is not None:
        stages = chosen_stages(options.stages.split())
        blends = blends_of(stages, is_wide=options.blend == "wide")
        if any("sif" in stage.requires for stage in stages):
            runtime_of_machine()  # nothing is made on a machine that cannot run the containers
    with only_one(options.data / ".prepare.lock"):
        if options.model != SMOLLM2:
            for blend in blends:
                make_all(blend, options.model, options)
            return 0
        if options.blend:
            wrong, fix = f"{SMOLLM2} has rows of its own", "leave it out, or take another model"
            raise DataError(Problem(where="--blend", wrong=wrong, fix=fix))
        prepare_data(options.data, seed=options.seed, blend=ENGLISH)
    return from_gguf.main(["--out", str(options.models / SMOLLM2)]) if options.models else 0


if __name__ == "__main__":
    sys.exit(main())
