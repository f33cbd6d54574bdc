"""A run of which processes are killed at random moments ends with every step, and with every prompt trained once.

A rollout worker is replaced while the run goes on; a prompt that has lost three of them fails, and the ledger says so.
Without its policy rank or its driver the run ends, and the same command starts it again.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest
from killing import RunCase, exact_step, find, make_case
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = 13
KILLS = 10
WORKER, POLICY, DRIVER = "ray::RolloutWorker", "ray::PolicyWorker", "run_grpo.py"


def make(tmp_path: Path, victim: str, *, num_steps: int) -> tuple[RunCase, Iterator[float]]:
    """Return a run, and for each kill the seconds until it."""
    overrides = {"grpo.async_grpo.num_rollout_workers": 2, "checkpointing.save_period": 3}
    chance = Random(f"{SEED}:{victim}")
    return make_case(tmp_path, num_steps, overrides), (chance.uniform(0.0, 4.0) for _ in range(KILLS))


def test_ten_rollout_workers_are_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    case, moments = make(tmp_path, WORKER, num_steps=400)
    with case.started() as run:
        for number, seconds in enumerate(moments):
            up_again = f"{WORKER} {number} times up again"
            case.wait_until(run, partial(has_been_up_again, case, number), up_again)
            case.wait_until(run, partial(has_done, case, case.steps_done() + 2), "two steps more")
            kill(run, case, WORKER, seconds)
        assert run.wait(timeout=patiently(600)) == 0, case.text()[-6000:]
    assert case.text().count("groups begin again") == KILLS
    assert "resumed from" not in case.text()
    case.check_end(may_fail=True)


@pytest.mark.parametrize("victim", [POLICY, DRIVER])
def test_a_run_that_is_killed_ten_times_is_resumed(victim: str, tmp_path: Path) -> None:
    """Every third kill comes while the run starts, the others after the first step of that start."""
    case, moments = make(tmp_path, victim, num_steps=200)
    for number, seconds in enumerate(moments):
        with case.started() as run:
            if number % 3:
                wait_for_step(run, case)
            kill(run, case, victim, seconds)
            assert run.wait(timeout=patiently(120)) != 0, f"a run without its {victim} claims success"
        exact_step(case.run_dir)
    with case.started() as run:
        assert run.wait(timeout=patiently(900)) == 0, case.text()[-6000:]
    case.check_end()


def has_been_up_again(case: RunCase, times: int) -> bool:
    return case.text().count("has been started again") == times


def has_done(case: RunCase, num_steps: int) -> bool:
    return case.steps_done() >= num_steps


def wait_for_step(run: subprocess.Popen[bytes], case: RunCase) -> None:
    case.wait_until(run, lambda: f"/{case.num_steps} | reward" in case.text(), "a step of this start")


def kill(run: subprocess.Popen[bytes], case: RunCase, victim: str, seconds: float) -> None:
    """Kill one process of that title so long after it has appeared."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = find(psutil.Process(run.pid), victim)
        return bool(found)

    case.wait_until(run, is_there, victim)
    time.sleep(seconds)
    found[0].kill()
