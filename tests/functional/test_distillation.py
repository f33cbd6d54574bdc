"""On-policy distillation on this machine: teachers on engines of their own, each for its rows, and a student.

Two teachers are the student with sharper opinions, so that it is known how far apart they are; three are specialists.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from speed import patiently
from tiny_run import launch_environment, run_environment

from tools.tiny.evaluate import evaluate, mean
from tools.tiny.prepare import TAUGHT, main

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 16
SETTINGS = {
    "grpo.num_prompts_per_step": 16,
    "grpo.num_generations_per_prompt": 4,
    "grpo.max_num_steps": NUM_STEPS,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "grpo.async_grpo.max_trajectory_age_steps": 0,
    "policy.generation.max_new_tokens": 24,
    "policy.megatron_cfg.optimizer.lr": 2.0e-3,
}
SHARPNESS = {"math_teacher": 6.0, "teacher": 3.0}  # of a teacher's logits, in those of the student


def teacher(model: Path, sharpness: float) -> dict[str, object]:
    """Write a teacher; return its model server."""
    path = model.with_name(f"sharp-{sharpness:g}")
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= sharpness
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    serve = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    settings = {"model": str(path), "return_token_id_information": False, "uses_reasoning_parser": False}
    return {
        "responses_api_models": {"local_vllm_model": {**settings, "vllm_serve_kwargs": {**serve, "max_num_seqs": 64}}}
    }


def test_the_student_comes_near_the_teacher_of_each_environment(tmp_path: Path) -> None:
    env = launch_environment(tmp_path, num_rows=4 + 16 * NUM_STEPS, overrides=SETTINGS)
    model = tmp_path / "model"
    servers = {name: teacher(model, sharpness) for name, sharpness in SHARPNESS.items()}
    teachers = {"math_with_judge_simple_agent": "math_teacher", "default": "teacher"}
    overlay = {
        "defaults": f"{ROOT}/configs/tiny/stage1_rlvr.yaml",
        "env": {"nemo_gym": {"num_gpu_nodes": len(servers), **servers}},
        "grpo": {"adv_estimator": {"name": "on_policy_distillation", "teachers": teachers}},
    }
    (tmp_path / "distil.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    done = subprocess.run(
        ["make", "stage1.1", f"MODEL_PATH={model}", f"CONFIG_PATH={tmp_path}/distil.yaml"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(880), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    [run_dir] = [path.parent for path in tmp_path.glob("*/metrics.jsonl")]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    distances = [record["train/teacher_reverse_kl"] for record in records if "train/teacher_reverse_kl" in record]
    assert len(distances) == NUM_STEPS
    assert sum(distances[-3:]) < 0.88 * sum(distances[:3]), distances  # measured with three seeds: 0.75, 0.79, 0.84
    assert not any("train/num_groups_zero_variance" in record for record in records)  # rewards are not compared


@pytest.mark.slow
def test_a_student_reaches_each_of_three_teachers(tmp_path: Path) -> None:
    """Measured on 400 answers of each environment: within 0.02 of each; here 200 are asked for."""
    data, models = tmp_path / "data", tmp_path / "models"
    assert main(["--data", str(data), "--models", str(models), "--blend", "teachers"]) == 0
    for name in ("train", "val"):
        (data / "tiny-taught" / f"{name}-split.jsonl").rename(tmp_path / f"{name}.jsonl")
    settings: dict[str, object] = {"grpo.val_num_generations_per_prompt": 8}
    for name in TAUGHT:
        server = f"env.nemo_gym.teacher_{name}.responses_api_models.local_vllm_model"
        settings[f"{server}.model"] = models / f"tiny-teacher-{name}"
    done = subprocess.run(
        ["make", "mopd", f"MODEL_PATH={models}/tiny-nemotron-h-sft"],
        cwd=ROOT, env=run_environment(tmp_path, settings),
        capture_output=True, text=True, timeout=patiently(800), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    lines = (tmp_path / "mopd-tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = [record for record in map(json.loads, lines) if "validation/accuracy" in record]
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text(encoding="utf-8").splitlines()]
    for name, task in TAUGHT.items():
        own = [row for row in rows if row["agent_ref"]["name"] == task.agent]
        rewards = evaluate(models / f"tiny-teacher-{name}", own, samples=2, seed=0)
        assert mean(rewards[f"{task.agent} sampled"]) > 0.95, name  # a specialist, which the student is not
        before, after = (record[f"validation/{task.agent}/accuracy"] for record in (first, last))
        assert before < 0.8, (name, before)
        assert after > mean(rewards[f"{task.agent} greedy"]) - 0.05, (name, after)  # measured: 1.000, 0.973, 1.000
