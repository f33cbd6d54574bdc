"""`make pipeline` on this machine: two tiny stages hand their weights over, and once finished nothing runs again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from speed import patiently
from tiny_run import TWO_STEPS, launch_environment

from tools.planning.provenance import model_digest

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"stage1.1": "rlvr1", "stage1.2": "rlvr2"}


def make_pipeline(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["make", "pipeline", f"STAGES={' '.join(STAGES)}"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(580), check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    return done


def test_each_stage_starts_from_its_parents_export(tmp_path: Path) -> None:
    env = launch_environment(tmp_path, num_rows=40, overrides=TWO_STEPS)
    env["MODEL_PATH"] = str(tmp_path / "model")  # of the first stage; the others find their parent themselves
    make_pipeline(env)
    parent = tmp_path / "model"
    seen = set()
    for stage, name in STAGES.items():
        run_dir = tmp_path / f"{stage}-{name}-tiny"
        lock = json.loads((run_dir / "run.lock.json").read_text())
        assert lock["model"] == {"path": str(parent.resolve()), **model_digest(parent)}
        seen.add(lock["model"]["weights_sha256"])
        used = json.loads((run_dir / "resolved.json").read_text())["config"]["policy"]["model_name"]
        assert used == str(parent.resolve())  # the step, not `latest`
        export = run_dir / "checkpoints" / "latest" / "hf"
        assert load_file(export / "model.safetensors").keys() == load_file(parent / "model.safetensors").keys()
        parent = export
    assert len(seen) == len(STAGES)  # each stage has trained

    again = make_pipeline(env)
    assert again.stderr.count("has reached its end, left out") == len(STAGES)
    assert not (tmp_path / "stage1.2-rlvr2-tiny" / "logs" / "attempt_2").exists()
