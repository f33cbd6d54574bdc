"""`make stage2.2` at the tiny scale: agents work on generated repositories in real containers, for a few steps.

What an agent did, how its work ended and what the hidden tests said of it is counted for every rollout, every prompt is
in the ledger once, and nothing of a container is left.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from small_root import require
from speed import patiently

from recipes.environments.swe.containers.places import PREFIX
from recipes.environments.swe.containers.runtime import BWRAP_PROGRAMS as PROGRAMS
from recipes.environments.swe.contract import AgentEnd
from recipes.grpo.checkpoint import complete_checkpoints, load_state
from tools.look.report.replay import rollouts_of
from tools.tiny.repositories import AGENT

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(7200)]

ROOT = Path(__file__).resolve().parents[2]
STEPS, PROMPTS, GENERATIONS = 2, 4, 8
FEW = {"grpo.max_num_steps": STEPS, "grpo.val_at_start": "false", "grpo.val_num_generations_per_prompt": 1}
HOME = re.compile(rf"/[^ ]*/{PREFIX}[^/ ]+")


def commands(processes: list[psutil.Process]) -> Iterator[str]:
    for process in processes:
        try:
            yield " ".join(process.cmdline())
        except psutil.Error:  # it has ended
            continue


def run_stage(env: dict[str, str], log: Path) -> set[str]:
    """Run the stage to its end; return the directories in which its processes had their containers."""
    homes: set[str] = set()
    end = time.monotonic() + patiently(1800)
    with (
        log.open("wb") as file,
        subprocess.Popen(["make", "stage2.2"], cwd=ROOT, env=env, stdout=file, stderr=file) as run,
    ):
        below = psutil.Process(run.pid)
        while run.poll() is None:
            if time.monotonic() > end:
                run.terminate()  # make ends what it runs
            for command in commands(below.children(recursive=True)):
                homes.update(HOME.findall(command))
            time.sleep(0.2)
    assert run.returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-6000:]
    return homes


def left_over(homes: set[str]) -> list[str]:
    """Return what there is of containers: their files, mounts and processes."""
    there = [home for home in homes if Path(home).exists()]
    seen = [*Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines(), *commands(list(psutil.process_iter()))]
    return there + [line for line in seen for home in homes if home in line]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Run the stage; return its run directory, and where its containers were."""
    require(*PROGRAMS)
    results = tmp_path_factory.mktemp("results")
    env = {**os.environ, "SCALE": "tiny", "LAUNCHER": "local", "RESULTS_DIR": str(results), "EXP_NAME": "swe"}
    subprocess.run(["make", "tiny"], cwd=ROOT, env=env | {"BLEND": "wide"}, check=True, timeout=patiently(1200))
    env["MODEL_PATH"] = str(ROOT / "models" / "tiny-wide-sft")
    env["EXTRA_HYDRA_ARGS"] = " ".join(f"{key}={value}" for key, value in FEW.items())
    return results / "swe", run_stage(env, results / "log")


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_nothing_of_the_containers_is_left(ended: tuple[Path, set[str]]) -> None:
    _, homes = ended
    assert homes, "no container was seen while the stage ran"
    end = time.monotonic() + patiently(30)
    while left := left_over(homes):
        assert time.monotonic() < end, left
        time.sleep(0.5)


def test_every_prompt_was_trained_once(ended: tuple[Path, set[str]]) -> None:
    run_dir, _ = ended
    ledger = load_state(complete_checkpoints(run_dir / "checkpoints")[STEPS]).ledger
    assert Counter(entry.step for entry in ledger) == dict.fromkeys(range(1, STEPS + 1), PROMPTS)
    assert sorted(int(entry.key.split(":")[1]) for entry in ledger) == list(range(STEPS * PROMPTS))


def test_how_each_rollout_ended_is_counted_and_the_share_of_resolved_is_reported(ended: tuple[Path, set[str]]) -> None:
    run_dir, _ = ended
    found = metrics(run_dir)
    assert [step["step"] for step in found] == list(range(1, STEPS + 1))
    for step in found:
        statuses = {key: value for key, value in step.items() if key.startswith("train/rollout_status/")}
        assert math.fsum(statuses.values()) == PROMPTS * GENERATIONS, statuses
        ends = {kind: step[f"train/{AGENT}/ended/{kind}/mean"] for kind in AgentEnd}
        assert math.fsum(ends.values()) == pytest.approx(1.0), ends
        assert step[f"train/{AGENT}/resolved/mean"] == step[f"train/{AGENT}/reward"]  # what is resolved earns 1
    resolved = found[-1][f"validation/{AGENT}/accuracy"]

    logged = [sample["trajectory"] for sample in rollouts_of(run_dir)]
    assert all(one["end"] in list(AgentEnd) for one in logged)
    assert any((one["tests"] or {}).get("resolved") for one in logged), "none of the logged agents solved its task"
    page = run_dir / "report.html"
    command = [sys.executable, "-m", "tools.look.report", "--run-dir", str(run_dir), "--out", str(page)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=patiently(120))
    assert f"held-out reward {resolved:.3f} at step {STEPS}" in page.read_text(encoding="utf-8")
