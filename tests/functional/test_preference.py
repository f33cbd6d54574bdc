"""Nano's two stages here: after GRPO, a model that calls tools which are not there stops it, on prompts new to it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from speed import patiently
from tiny_run import run_environment

from tools.tiny.prepare import main

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


def held_out_of(run_dir: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the first and the last record with held-out rewards."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [record for record in map(json.loads, lines) if "validation/accuracy" in record]
    return held_out[0], held_out[-1]


def run_stage(stage: str, rows: Path, results: Path, settings: dict[str, object], *words: str) -> None:
    """Run a stage on these rows."""
    env = run_environment(results, settings)
    env |= {name: str(rows / f"{split}-split.jsonl") for name, split in (("TRAIN_PATH", "train"), ("VAL_PATH", "val"))}
    done = subprocess.run(
        ["make", stage, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=patiently(800), check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"


def test_calls_of_tools_that_do_not_exist_become_rare_and_the_reward_stays(tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    assert main(["--data", str(data), "--models", str(tmp_path), "--blend", "tools"]) == 0
    run_stage("nano-rl", data / "tiny-nano", results, {}, f"MODEL_PATH={tmp_path}/tiny-tools-sft")
    learned = held_out_of(results / "nano3-rl-tiny")
    assert learned[-1]["validation/accuracy"] > learned[0]["validation/accuracy"] + 0.1

    # It starts from the export of the stage before, which has had no rows with tools.
    run_stage("nano-dpo", data / "tiny-tools", results, {"grpo.val_num_generations_per_prompt": 16})
    lines = (results / "nano3-dpo-tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    first, last = held_out_of(results / "nano3-dpo-tiny")
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
