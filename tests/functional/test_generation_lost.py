"""A run that loses one of its two engines goes on: no restart, the right number of steps, every prompt trained once.

The engine is killed by its actor or by its EngineCore process. What matters is the moment: while the engines sample the
first prompts, between steps, in a push, or near the end, when the run ends while the engine is started again.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from speed import patiently
from tiny_run import launch_environment

from recipes.grpo.checkpoint import complete_checkpoints, load_state

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GENERATIONS, STEPS = 4, 2, 40
OVERRIDES = {
    "cluster.gpus_per_node": 3,  # one worker process trains, two are engines
    "policy.generation.colocated.resources.gpus_per_node": 2,
    "grpo.num_prompts_per_step": PROMPTS,
    "grpo.num_generations_per_prompt": GENERATIONS,
    "grpo.max_num_steps": STEPS,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "policy.generation.max_new_tokens": 64,
}


@dataclass(frozen=True)
class Moment:
    """When to kill which process: so long after a step, of the engine that is `index` by process id."""

    step: int
    seconds: float
    process: str
    index: int


ACTOR, CORE = "ray::EngineActor", "VLLM::EngineCore"
SAMPLE = [Moment(1, 0.05, CORE, 0)]
OTHERS = [
    Moment(0, 0.0, ACTOR, 0),
    Moment(0, 0.3, CORE, 1),
    Moment(2, 0.1, ACTOR, 1),
    Moment(5, 0.02, CORE, 0),
    Moment(10, 0.15, ACTOR, 0),
    Moment(15, 0.0, CORE, 1),
    Moment(20, 0.0, ACTOR, 1),
    Moment(30, 0.2, CORE, 0),
    Moment(38, 0.0, ACTOR, 1),
]
MOMENTS = [*SAMPLE, *(pytest.param(moment, marks=pytest.mark.slow) for moment in OTHERS)]


def find(parent: psutil.Process, name: str) -> list[psutil.Process]:
    """Return the processes below `parent` with this title, by process id."""
    found = []
    for process in parent.children(recursive=True):
        try:
            if any(word.startswith(name) for word in process.cmdline()[:1]):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


def steps_done(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_run_outlives_one_of_two_engines(moment: Moment, tmp_path: Path) -> None:
    environment = launch_environment(tmp_path, num_rows=STEPS * PROMPTS + 20, overrides=OVERRIDES)
    environment |= {"EXP_NAME": "lost", "MODEL_PATH": str(tmp_path / "model")}
    run_dir, log = tmp_path / "lost", tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen(["make", "stage1.1"], cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        kill_at(moment, run, run_dir, log)
        status = run.wait(timeout=patiently(300))
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(timeout=patiently(60))
    text = log.read_text(errors="replace")
    assert status == 0, text[-6000:]
    assert re.search(r"generation engine [01] .*; its requests are sampled elsewhere; 1 of 2 engines are left", text)
    assert "engines 1 of 2" in text, "the progress line must say that an engine is missing"
    assert "resumed from" not in text

    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    ledger = load_state(checkpoints[STEPS]).ledger
    assert Counter(entry.step for entry in ledger) == dict.fromkeys(range(1, STEPS + 1), PROMPTS)
    rows = sorted(int(entry.key.split(":")[1]) for entry in ledger)
    assert rows == list(range(STEPS * PROMPTS)), "a prompt was lost, or trained twice"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))


def kill_at(moment: Moment, run: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
    deadline = time.monotonic() + patiently(240)
    victims: list[psutil.Process] = []
    begun = "policy and engines are up"
    while len(victims) < 2 or begun not in log.read_text(errors="replace") or steps_done(run_dir) < moment.step:
        assert run.poll() is None, f"ended before step {moment.step}:\n{log.read_text(errors='replace')[-6000:]}"
        assert time.monotonic() < deadline, f"no step {moment.step}:\n{log.read_text(errors='replace')[-6000:]}"
        if len(victims) < 2:
            victims = find(psutil.Process(run.pid), moment.process)
        time.sleep(0.02)
    time.sleep(moment.seconds)
    victims[moment.index].kill()
