"""Inputs of a very small real run: random weights, rows of the tiny tasks, and the launch's environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from speed import patiently

from tools.tiny.model import build_model, build_tokenizer
from tools.tiny.tasks import TASKS, make_row

NUM_VALIDATION_ROWS = 4
DEADLINES = {  # in seconds, of tiny runs on a quiet machine
    "placement": 180,
    "generation": 60,
    "rollout": 90,
    "refit": 60,
    "train": 120,
    "checkpoint": 120,
    "progress": 300,
}
TWO_STEPS = {  # of a stage whose export differs from its start weights
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 2,
    "grpo.max_num_steps": 2,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "policy.generation.max_new_tokens": 8,
    "policy.megatron_cfg.optimizer.weight_decay": 10,  # moves the weights: the rewards of random ones are all equal
}


def launch_environment(
    directory: Path,
    *,
    num_rows: int,
    overrides: Mapping[str, Any],
    build: Callable[..., Any] = build_model,
) -> dict[str, str]:
    """Write model and rows into `directory`; return what `make stage...` needs to run on them there."""
    tokenizer = build_tokenizer()
    model = build(tokenizer, seed=0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(directory / "model")
    model.save_pretrained(directory / "model")
    rng = Random(0)
    tasks = [TASKS[index % len(TASKS)] for index in range(num_rows)]
    lines = [json.dumps({**make_row(task, task.draw(rng)), "uuid": index}) + "\n" for index, task in enumerate(tasks)]
    (directory / "train.jsonl").write_text("".join(lines[NUM_VALIDATION_ROWS:]), encoding="utf-8")
    (directory / "val.jsonl").write_text("".join(lines[:NUM_VALIDATION_ROWS]), encoding="utf-8")
    return run_environment(directory, overrides)


def run_environment(directory: Path, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return what `make stage...` needs to run on the rows in `directory`, with time by the speed of the machine."""
    deadlines = {f"deadlines.{name}": round(patiently(seconds)) for name, seconds in DEADLINES.items()}
    settings = deadlines | dict(overrides)
    return {
        **os.environ,
        "SCALE": "tiny",
        "LAUNCHER": "local",
        "RESULTS_DIR": str(directory),
        "TRAIN_PATH": str(directory / "train.jsonl"),
        "VAL_PATH": str(directory / "val.jsonl"),
        "EXTRA_HYDRA_ARGS": " ".join(f"{key}={value}" for key, value in settings.items()),
    }
