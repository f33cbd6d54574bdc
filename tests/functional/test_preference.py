"""DPO on this machine: a model that calls tools which are not there stops it, on prompts that it has not seen."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from speed import patiently
from tiny_run import run_environment

from tools.tiny.make_blend import TOOLS
from tools.tiny.prepare import prepare_data, prompts_of
from tools.tiny.sft import make_sft_checkpoint, tools_settings

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


def test_calls_of_tools_that_do_not_exist_become_rare_and_the_reward_stays(tmp_path: Path) -> None:
    rows = prepare_data(tmp_path, seed=42, blend=TOOLS)
    for name in ("train", "val"):
        (rows / f"{name}-split.jsonl").rename(tmp_path / f"{name}.jsonl")
    make_sft_checkpoint(tmp_path / "model", tools_settings(seed=42), prompts_of(tmp_path / "val.jsonl"))
    done = subprocess.run(
        ["make", "nano-dpo", f"MODEL_PATH={tmp_path}/model"],
        cwd=ROOT, env=run_environment(tmp_path, {"grpo.val_num_generations_per_prompt": 16}),
        capture_output=True, text=True, timeout=patiently(800), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    lines = (tmp_path / "nano3-dpo-tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    held_out = [record for record in records if "validation/unknown_tool_rate" in record]
    first, last = held_out[0], held_out[-1]
    assert (first["step"], last["step"]) == (0, records[-1]["step"])
    assert first["validation/unknown_tool_rate"] > 0.08  # of 1,024 calls; measured: 0.153
    assert last["validation/unknown_tool_rate"] < 0.01  # measured: 0.000
    for kind in ("accuracy", "greedy_accuracy"):
        assert last[f"validation/{kind}"] >= first[f"validation/{kind}"]

    steps = [record for record in records if "train/num_pairs" in record]
    assert steps[0]["train/preference_loss"] == pytest.approx(0.693147, abs=1e-4)  # log 2: the policy is the reference
    paired = [record for record in steps if record["train/num_pairs"] > 0]
    assert paired[-1]["train/rewards_chosen_mean"] > 0
    assert not any("train/advantages/mean" in record or "train/kl_penalty" in record for record in steps)
