"""A run that is stopped, again and again, trains every prompt exactly once.

A stop is that of driver, generation actor or policy worker, before the first save of the attempt, while a checkpoint is
being written, or right after one. The driver's after a save is a request, SIGTERM, which it answers with a checkpoint;
the others are kills. Every start is the same `make stage1.1`. One run has the kill of the process that writes the
checkpoint, and the request; another, which takes long, has all nine stops.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from speed import patiently
from tiny_run import launch_environment

from recipes.grpo.checkpoint import complete_checkpoints, load_state

pytestmark = [pytest.mark.functional, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GENERATIONS, SAVE_PERIOD = 4, 2, 3
START_SECONDS, EXIT_SECONDS = 300.0, 60.0

VICTIMS = {"driver": "run_grpo.py", "generation": "ray::EngineActor", "policy": "ray::PolicyWorker"}
MOMENTS = ("before a save", "while saving", "after a save")
ALL = [(moment, victim) for moment in MOMENTS for victim in VICTIMS]
REQUEST = ("after a save", "driver")
SAMPLE = [("while saving", "driver"), REQUEST]
ERRORS = {
    "driver": "",
    "generation": "generation engine 0",
    "policy": "rank 0 (pid",
}


class Attempt:
    """One `make stage1.1` and the processes below it."""

    def __init__(self, run_dir: Path, env: dict[str, str]) -> None:
        self.run_dir = run_dir
        self.log = run_dir.parent / f"{run_dir.name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["make", "stage1.1"], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def find(self, victim: str) -> psutil.Process | None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                # A Ray actor shows as "ray::Class" or "ray::Class.method": its title replaces the command line.
                words = process.cmdline()
                if any(word.startswith(victim) or word.endswith(victim) for word in words[:2]):
                    return process
            except psutil.NoSuchProcess:
                continue
        return None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + patiently(START_SECONDS)
        while not condition():
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.tail()}"
            assert time.monotonic() < end, f"no {what} within {patiently(START_SECONDS):.0f} s:\n{self.tail()}"
            time.sleep(0.02)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(timeout=patiently(seconds))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            pytest.fail(f"still running {patiently(seconds):.0f} s later:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace", encoding="utf-8").splitlines()[-60:])


def last_step(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    return max((int(json.loads(line)["step"]) for line in lines), default=0)


def saved(run_dir: Path) -> int:
    return max(complete_checkpoints(run_dir / "checkpoints"), default=0)


def environment(directory: Path, num_steps: int, more: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the launch's environment: random weights are enough, and every prompt must be seen once."""
    overrides: dict[str, Any] = {
        "grpo.num_prompts_per_step": PROMPTS,
        "grpo.num_generations_per_prompt": GENERATIONS,
        "grpo.max_num_steps": num_steps,
        "grpo.val_at_start": "false",
        "grpo.val_at_end": "false",
        "checkpointing.save_period": SAVE_PERIOD,
        "checkpointing.keep_top_k": 2,
        "policy.generation.max_new_tokens": 8,
        **(more or {}),
    }
    variables = launch_environment(directory, num_rows=num_steps * PROMPTS + 40, overrides=overrides)
    return {**variables, "EXP_NAME": "resume", "MODEL_PATH": str(directory / "model")}


def stop_at(attempt: Attempt, victim: str, moment: str, number: signal.Signals) -> None:
    checkpoints, before = attempt.run_dir / "checkpoints", saved(attempt.run_dir)
    if moment == "before a save":
        attempt.wait_until(lambda: " | reward" in attempt.log.read_text(errors="replace", encoding="utf-8"), "a step")
    elif moment == "while saving":
        attempt.wait_until(lambda: any(checkpoints.glob("tmp_step_*/policy/*")), "a checkpoint begun")
    else:
        attempt.wait_until(lambda: saved(attempt.run_dir) > before, "a checkpoint")
    process = attempt.find(VICTIMS[victim])
    assert process is not None, f"no {victim} process:\n{attempt.tail()}"
    process.send_signal(number)


@pytest.mark.parametrize(
    ("stops", "num_steps"),
    [
        pytest.param(SAMPLE, 15, id="two stops", marks=pytest.mark.promise),
        pytest.param(ALL, 40, id="nine stops", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_trains_every_prompt_once(
    stops: list[tuple[str, str]], num_steps: int, tmp_path: Path
) -> None:
    run_dir, env = tmp_path / "resume", environment(tmp_path, num_steps)
    for moment, victim in stops:
        resumed_from = saved(run_dir)
        for left in (run_dir / "checkpoints").glob("tmp_*"):
            shutil.rmtree(left)  # so that this attempt's own half-written checkpoint is the one waited for
        attempt = Attempt(run_dir, env)
        is_asked = (moment, victim) == REQUEST
        stop_at(attempt, victim, moment, signal.SIGTERM if is_asked else signal.SIGKILL)
        assert attempt.wait(EXIT_SECONDS) != 0, f"a run without its {victim} claims success:\n{attempt.tail()}"
        log = attempt.log.read_text(errors="replace", encoding="utf-8")
        assert ERRORS[victim] in log, f"the {victim}'s death is not named:\n{attempt.tail()}"
        assert f"step {resumed_from}, " in log or resumed_from == 0, "did not resume from the last checkpoint"
        assert saved(run_dir) >= resumed_from
        if is_asked:
            assert "Error 75" in log, f"not stopped to be started again:\n{attempt.tail()}"
            assert saved(run_dir) == last_step(run_dir) > resumed_from, "a step is lost"

    attempt = Attempt(run_dir, env)
    assert attempt.wait(START_SECONDS + 120) == 0, attempt.tail()
    check_end(run_dir, num_steps)


def check_end(run_dir: Path, num_steps: int) -> None:
    """Every step and every prompt is there once."""
    assert last_step(run_dir) == saved(run_dir) == num_steps

    ledger = load_state(complete_checkpoints(run_dir / "checkpoints")[num_steps]).ledger
    per_step = Counter(entry.step for entry in ledger)
    assert per_step == dict.fromkeys(range(1, num_steps + 1), PROMPTS), "a step trained another number of prompts"
    rows = [int(entry.key.split(":")[1]) for entry in ledger]
    assert sorted(rows) == list(range(num_steps * PROMPTS)), "a prompt was trained twice or skipped"
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == list(range(1, num_steps + 1)), "metrics.jsonl shows a step twice or not at all"


def test_a_start_whose_ranks_find_damage_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    run_dir, more = tmp_path / "resume", {"checkpointing.save_period": 1}
    attempt = Attempt(run_dir, environment(tmp_path, 5, {**more, "grpo.max_num_steps": 3}))
    assert attempt.wait(START_SECONDS) == 0, attempt.tail()
    newest = complete_checkpoints(run_dir / "checkpoints")[3]
    (share,) = (newest / "policy").glob("*.distcp")
    with share.open("r+b") as file:  # one bit, in the middle: names, sizes and small files are as they were
        file.seek(share.stat().st_size // 2)
        bit = file.read(1)[0] ^ 1
        file.seek(-1, 1)
        file.write(bytes([bit]))
    attempt = Attempt(run_dir, environment(tmp_path, 5, more))
    assert attempt.wait(START_SECONDS) == 0, attempt.tail()
    log = attempt.log.read_text(errors="replace", encoding="utf-8")
    assert f"damaged checkpoint: {share}: the file is missing or differs from its checksum" in log
    assert "step_000002: step 2, " in log, "the run has not gone on from the one before"
    assert [path.name for path in (run_dir / "checkpoints").glob("damaged_*")] == ["damaged_step_000003"]
    check_end(run_dir, 5)
