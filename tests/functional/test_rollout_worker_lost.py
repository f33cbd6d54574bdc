"""A run that loses one of its two rollout workers goes on: its groups begin again, every prompt is trained once."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from speed import patiently
from test_generation_lost import find, steps_done
from tiny_run import launch_environment

from recipes.grpo.checkpoint import complete_checkpoints, load_state

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, STEPS = 4, 6
OVERRIDES = {
    "grpo.num_prompts_per_step": PROMPTS,
    "grpo.num_generations_per_prompt": 2,
    "grpo.max_num_steps": STEPS,
    "grpo.async_grpo.num_rollout_workers": 2,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "policy.generation.max_new_tokens": 64,
}


def test_a_run_outlives_one_of_two_rollout_workers(tmp_path: Path) -> None:
    environment = launch_environment(tmp_path, num_rows=STEPS * PROMPTS + 20, overrides=OVERRIDES)
    environment |= {"EXP_NAME": "lost", "MODEL_PATH": str(tmp_path / "model")}
    run_dir, log = tmp_path / "lost", tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen(["make", "stage1.1"], cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        children = kill_worker(run, run_dir, log)
        status = run.wait(timeout=patiently(300))
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(timeout=patiently(60))
    text = log.read_text(errors="replace")
    assert status == 0, text[-6000:]
    assert re.search(r"rollout worker [01]: its process died \(\w+\); its [1-9][0-9]* groups begin again", text)
    assert re.search(r"rollout worker [01] has been started again", text)
    assert "resumed from" not in text
    assert children, "no scoring process had been started"

    ledger = load_state(complete_checkpoints(run_dir / "checkpoints")[STEPS]).ledger
    assert Counter(entry.step for entry in ledger) == dict.fromkeys(range(1, STEPS + 1), PROMPTS)
    rows = sorted(int(entry.key.split(":")[1]) for entry in ledger)
    assert rows == list(range(STEPS * PROMPTS)), "a prompt was lost, or trained twice"
    assert steps_done(run_dir) == STEPS


def kill_worker(run: subprocess.Popen[bytes], run_dir: Path, log: Path) -> list[psutil.Process]:
    """Kill a worker after the second step, and wait until its scoring processes have ended; return these."""
    deadline = time.monotonic() + patiently(240)
    while steps_done(run_dir) < 2:
        assert run.poll() is None, f"ended before step 2:\n{log.read_text(errors='replace')[-6000:]}"
        assert time.monotonic() < deadline, f"no step 2:\n{log.read_text(errors='replace')[-6000:]}"
        time.sleep(0.02)
    worker, _ = find(psutil.Process(run.pid), "ray::RolloutWorker")
    children = worker.children(recursive=True)
    worker.kill()
    deadline = time.monotonic() + patiently(60)
    while not all(map(has_ended, children)):
        assert time.monotonic() < deadline, "scoring processes outlive their worker"
        time.sleep(0.1)
    return children


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended: nobody reads the status of an orphan before the run ends."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
