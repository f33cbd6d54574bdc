"""Stage 4 here: the heads learn what the policy says, engines accept more drafts, and the policy is as before.

What is accepted is counted by vLLM, which decodes with these heads while the stage runs.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from speed import patiently
from test_speculation import MAINLY, write_model
from tiny_run import launch_environment

from tools.tiny.model import build_hybrid_model

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 12
SETTINGS = {
    "grpo.num_prompts_per_step": 8,
    "grpo.num_generations_per_prompt": 4,
    "grpo.max_num_steps": NUM_STEPS,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "grpo.async_grpo.max_trajectory_age_steps": 0,  # so that a step's drafts are all of one version of the heads
    "policy.generation.max_new_tokens": 40,
    "policy.megatron_cfg.optimizer.lr": 5.0e-3,
    "policy.megatron_cfg.optimizer.weight_decay": 0.1,  # moves any weight that is trained, whatever its gradient
    "checkpointing.save_period": 6,
}


def digests(directory: Path) -> dict[str, str]:
    """Return the sha256 of each tensor of a model directory."""
    tensors = load_file(directory / "model.safetensors")
    return {name: hashlib.sha256(one.numpy().tobytes()).hexdigest() for name, one in tensors.items()}


def test_healing_raises_what_is_accepted_and_leaves_the_policy(tmp_path: Path) -> None:
    env = launch_environment(tmp_path, num_rows=4 + 8 * NUM_STEPS, overrides=SETTINGS, build=build_hybrid_model)
    model = write_model(tmp_path / "model", newest_token=MAINLY, mixers=None)  # random heads
    done = subprocess.run(
        ["make", "stage4", f"MODEL_PATH={model}"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(580), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    run_dir = tmp_path / "stage4-healing-tiny"

    before, after = digests(model), digests(run_dir / "checkpoints" / "latest" / "hf")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all(name.startswith("mtp.") for name in changed)

    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "train/vllm/spec_acceptance_rate" in record]
    rates = [record["train/vllm/spec_acceptance_rate"] for record in steps]
    losses = [record["train/mtp/mtp_1_loss"] for record in steps]
    assert max(record["train/logprob_error_max"] for record in steps) < 1e-3  # also of answers that ran during a push
    assert len(losses) == NUM_STEPS and losses[-1] < 0.8 * losses[0]
    of_policy = {"loss", "grad_norm", "kl_penalty", "probs_ratio", "advantages/mean", "num_groups_zero_variance"}
    of_policy.add("r3/changed_route_fraction")
    assert not of_policy & {key.removeprefix("train/") for record in steps for key in record}  # it has none of them
    assert len(rates) == NUM_STEPS and sum(rates[-3:]) > 1.2 * sum(rates[:3]), rates
