"""A run that loses one of its two rollout workers goes on: its groups begin again, every prompt is trained once."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from killing import RunCase, find, make_case
from speed import patiently

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

STEPS = 6


def test_a_run_outlives_one_of_two_rollout_workers(tmp_path: Path) -> None:
    case = make_case(tmp_path, STEPS, {"grpo.async_grpo.num_rollout_workers": 2})
    with case.started() as run:
        children = kill_worker(run, case)
        status = run.wait(timeout=patiently(300))
    text = case.text()
    assert status == 0, text[-6000:]
    assert re.search(r"rollout worker [01]: its process died \(\w+\); its [1-9][0-9]* groups begin again", text)
    assert re.search(r"rollout worker [01] has been started again", text)
    assert "resumed from" not in text
    assert children, "no scoring process had been started"
    case.check_end()


def kill_worker(run: subprocess.Popen[bytes], case: RunCase) -> list[psutil.Process]:
    """Kill a worker after the second step, and wait until its scoring processes have ended; return these."""
    case.wait_until(run, lambda: case.steps_done() >= 2, "step 2")
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
