"""The newcomer's command, as it is: `make smoke` trains the tiny stage and checks its own gain."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.functional, pytest.mark.promise, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    env = {**os.environ, "RESULTS_DIR": str(results), "EXP_NAME": "smoke", "SEED": "42"}
    done = subprocess.run(
        ["make", "smoke"], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert re.search(r"all, sampled +0\.\d{3} +0\.\d{3} +\+0\.\d{3}", done.stdout), done.stdout[-3000:]
    return results / "smoke"


def records(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_start_leaves_room_and_one_skill_is_new(run_dir: Path) -> None:
    first, last = records(run_dir)[0], records(run_dir)[-1]
    assert 0.2 <= first["validation/accuracy"] <= 0.6
    assert last["validation/accuracy"] - first["validation/accuracy"] >= 0.25
    assert first["validation/mcqa_simple_agent/greedy_accuracy"] < 0.35, "not a new skill: greedy has it already"
    assert last["validation/mcqa_simple_agent/greedy_accuracy"] > 0.6


def test_training_was_one_step_off_and_the_engine_agreed(run_dir: Path) -> None:
    steps = [record for record in records(run_dir) if record["step"] > 0]
    assert max(record["train/max_trajectory_age"] for record in steps) == 1
    # The first step's rollouts were sampled with the very weights it trains: what differs is the engine alone.
    assert steps[0]["train/max_trajectory_age"] == 0
    assert steps[0]["train/logprob_error_max"] < 1e-4


def test_everything_a_user_looks_for_is_there(run_dir: Path) -> None:
    latest = run_dir / "checkpoints" / "latest"
    for path in (
        latest / "COMPLETE",
        latest / "hf" / "config.json",
        latest / "hf" / "model.safetensors",
        latest / "hf" / "tokenizer.json",
        run_dir / "resolved.json",
        run_dir / "run.lock.json",
        run_dir / "report.html",
        run_dir / "rollouts" / "train.jsonl",
        run_dir / "logs" / "latest" / "driver.log",
    ):
        assert path.is_file(), path
    assert any((run_dir / "tensorboard").iterdir())
    assert json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))["config"]["grpo"]["seed"] == 42
