"""A run in which a process stands still ends, says which one it is, and goes on when it is started again."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from killing import RunCase, exact_step, find, make_case
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.timeout(1800)]

DEADLINES = {"generation": 20, "rollout": 25, "refit": 30, "train": 30, "checkpoint": 30, "progress": 40}  # seconds
# Of a node that says nothing, as a job of few nodes has them: see recipes/cluster/tuning.py.
HEALTH = {"period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 3}


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        pytest.param(
            "ray::RolloutWorker",
            r"without a new one .*; rollout worker 0: has not answered for [0-9]+ s",
            marks=pytest.mark.slow,
        ),
        ("raylet", r"no answer of the raylet of this node .*; raylet \(pid [0-9]+\) is stopped \(SIGSTOP\)"),
    ],
    ids=["worker", "raylet"],
)
def test_a_run_whose_process_stands_still_says_which_and_is_resumed(tmp_path: Path, victim: str, said: str) -> None:
    overrides = {f"deadlines.{name}": patiently(seconds) for name, seconds in DEADLINES.items()}
    health = {f"RAY_health_check_{name}": str(number) for name, number in HEALTH.items()}
    case = make_case(tmp_path, 40, overrides | {"checkpointing.save_period": 5})
    case = RunCase(directory=case.directory, num_steps=case.num_steps, environment={**case.environment, **health})
    with case.started() as run:
        stopped = stop_one(run, case, victim)
        assert run.wait(timeout=patiently(240)) != 0
    assert re.search(said, case.text()), case.text()[-4000:]
    assert not psutil.pid_exists(stopped), "what stands still holds memory and files of the run"
    exact_step(case.run_dir)
    with case.started() as run:
        assert run.wait(timeout=patiently(300)) == 0, case.text()[-6000:]
    assert "resumed from" in case.text()
    case.check_end()


def stop_one(run: subprocess.Popen[bytes], case: RunCase, victim: str) -> int:
    """Stop a process after the first checkpoint, from which the run goes on; return its id."""
    case.wait_until(run, lambda: "recipes.grpo.saving: saved" in case.text(), "a checkpoint")
    found = find(psutil.Process(run.pid), victim)
    found += [process for process in psutil.Process(run.pid).children(recursive=True) if process.name() == victim]
    found[0].send_signal(signal.SIGSTOP)
    return found[0].pid
