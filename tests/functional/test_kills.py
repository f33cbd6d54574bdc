"""A run of which processes are killed at random moments ends with every step, and with every prompt trained once.

A rollout worker is replaced while the run goes on; a prompt that has lost three of them fails, and the ledger says so.
Without its policy rank the run ends, and the same command starts it again. `test_resume.py` also kills the driver.
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
from killing import RunCase, find, make_case
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = 13
WORKER, POLICY = "ray::RolloutWorker", "ray::PolicyWorker"


def make(tmp_path: Path, victim: str, *, kills: int, num_steps: int) -> tuple[RunCase, Iterator[float]]:
    """Return a run, and for each kill the seconds until it."""
    overrides = {"grpo.async_grpo.num_rollout_workers": 2, "checkpointing.save_period": 3}
    chance = Random(f"{SEED}:{victim}")
    return make_case(tmp_path, num_steps, overrides), (chance.uniform(0.0, 4.0) for _ in range(kills))


def test_ten_rollout_workers_are_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    case, moments = make(tmp_path, WORKER, kills=10, num_steps=400)
    with case.started() as run:
        for number, seconds in enumerate(moments):
            up_again = f"{WORKER} {number} times up again"
            case.wait_until(run, partial(has_been_up_again, case, number), up_again)
            case.wait_until(run, partial(has_done, case, case.steps_done() + 2), "two steps more")
            kill(run, case, WORKER, seconds)
        assert run.wait(timeout=patiently(600)) == 0, case.text()[-6000:]
    assert case.text().count("groups begin again") == 10
    assert "resumed from" not in case.text()
    case.check_end(may_fail=True)


def test_a_run_that_loses_its_policy_rank_four_times_is_resumed(tmp_path: Path) -> None:
    """Every third kill comes while the run starts, the others after the first step of that start."""
    case, moments = make(tmp_path, POLICY, kills=4, num_steps=60)
    for number, seconds in enumerate(moments):
        with case.started() as run:
            if number % 3:
                wait_for_step(run, case)
            kill(run, case, POLICY, seconds)
            assert run.wait(timeout=patiently(120)) != 0, "a run without its policy claims success"
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
