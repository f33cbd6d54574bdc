"""Stages 1.1, 1.2 and 1.3 in a chain at the tiny scale: each starts from its parent's last complete export."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_run import launch_environment

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = {
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 2,
    "grpo.max_num_steps": 2,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "policy.generation.max_new_tokens": 8,
}


def test_each_stage_starts_from_its_parents_export(tmp_path: Path) -> None:
    env = launch_environment(tmp_path, num_rows=40, overrides=OVERRIDES)
    parent = tmp_path / "model"
    for stage, name in (("stage1.1", "rlvr1"), ("stage1.2", "rlvr2"), ("stage1.3", "rlvr3")):
        given = {"MODEL_PATH": str(parent)} if stage == "stage1.1" else {}  # the others find their parent themselves
        done = subprocess.run(
            ["make", stage],
            cwd=ROOT,
            env={**env, **given},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{stage}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
        run_dir = tmp_path / f"{stage}-{name}-tiny"
        lock = json.loads((run_dir / "run.lock.json").read_text())
        assert Path(lock["model"]["path"]).resolve() == parent.resolve()
        export = (run_dir / "checkpoints" / "latest" / "hf").resolve()
        assert load_file(export / "model.safetensors").keys() == load_file(parent / "model.safetensors").keys()
        parent = export
