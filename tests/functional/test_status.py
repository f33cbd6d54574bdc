"""`make status` and `make watch` before a real run: while it trains, killed, resumed to its end; and in Slurm's queue.

The finished run also checks the simulator: with the speeds of the run it has to give the run's own step time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm.cluster import ROOT, Cluster
from speed import patiently
from tiny_run import launch_environment

from tools.bench.calibrate import measured, measured_loop
from tools.draft.slurm import Queue
from tools.look.report.load import load_run
from tools.look.run_state import RunStatus, read_run
from tools.sizing.simulator import forecast

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

START_SECONDS = 300.0  # until the first steps are saved, on a machine that does other things, too
END_SECONDS = 60.0  # from the end of a run, or a signal, to that of its last process
NUM_STEPS, SAVE_PERIOD = 12, 4
OVERRIDES = {
    "grpo.max_num_steps": NUM_STEPS,
    "grpo.val_period": 0,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "grpo.async_grpo.max_trajectory_age_steps": 0,  # the simulator has to tell waiting from training
    "checkpointing.save_period": SAVE_PERIOD,
    "logger.tensorboard_enabled": "false",
}

DRIVER = """
import sys, time
from pathlib import Path
from recipes.config.tree import DeadlinesConfig
from recipes.heartbeat import Heartbeat

names = "placement engine_start generation rollout refit train checkpoint progress shutdown".split()
run_dir = Path(sys.argv[1])
while not run_dir.with_name("go").exists():
    time.sleep(0.1)
with Heartbeat(run_dir, DeadlinesConfig(**dict.fromkeys(names, 600.0))):
    time.sleep(60)
"""


def status(results: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Return exit status and content of `status --json`."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.look.status", "--results", str(results), "--json", *words],
        capture_output=True,
        text=True,
        timeout=patiently(60),
        cwd=ROOT,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


class Runs:
    """One run directory and the processes that were started in it."""

    def __init__(self, directory: Path) -> None:
        self.results, self.env = directory, launch_environment(directory, num_rows=600, overrides=OVERRIDES)
        self.run_dir = directory / "watched"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=self.env | {"EXP_NAME": "watched", "MODEL_PATH": str(self.results / "model")},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def launch(self) -> subprocess.Popen[str]:
        return self.start("./super_launch.sh", "stage1.1")

    def watch(self) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-m", "tools.look.watch", "--results", str(self.results))

    def wait_for_save(self, launched: subprocess.Popen[str]) -> dict[str, Any]:
        """Return the status when the first checkpoint is there; the run is in its next steps then."""
        end = time.monotonic() + patiently(START_SECONDS)
        while time.monotonic() < end and launched.poll() is None:
            if list(self.run_dir.glob("checkpoints/step_*/COMPLETE")):
                return status(self.results)[1]
            time.sleep(0.2)
        launched.terminate()
        raise AssertionError(launched.communicate(timeout=patiently(END_SECONDS))[0][-4000:])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    found = Runs(tmp_path_factory.mktemp("status"))
    yield found
    for process in found.started:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=patiently(END_SECONDS))


def test_no_run_is_exit_status_2_with_what_to_do(tmp_path: Path) -> None:
    code, answer = status(tmp_path)
    assert code == 2
    assert "make smoke" in answer["error"]


def test_a_run_that_trains_and_is_killed_without_a_last_word(runs: Runs) -> None:
    launched = runs.launch()
    seen = runs.wait_for_save(launched)
    assert seen["state"] == "running"
    assert SAVE_PERIOD <= seen["step"] <= NUM_STEPS and seen["num_steps"] == NUM_STEPS
    assert seen["saved_step"] >= SAVE_PERIOD and seen["stage"] == "stage1.1"
    assert len(seen["waits"]) == 2
    assert seen["eta_seconds"] is not None and seen["max_trajectory_age"] == 0.0

    os.kill(json.loads((runs.run_dir / "status.json").read_text(encoding="utf-8"))["pid"], signal.SIGKILL)
    launched.communicate(timeout=patiently(END_SECONDS))
    code, dead = status(runs.results)
    assert (code, dead["state"]) == (1, "dead")
    assert "is gone without a last word" in dead["why"]
    assert dead["next"].startswith(f"start it again: it resumes after step {dead['saved_step']}")


def test_watching_the_resumed_run_to_its_end(runs: Runs) -> None:
    launched, end = runs.launch(), time.monotonic() + patiently(START_SECONDS)
    while read_run(runs.run_dir, Queue()).status not in (RunStatus.STARTING, RunStatus.RUNNING):
        assert launched.poll() is None
        assert time.monotonic() < end
        time.sleep(0.2)
    output, _ = runs.watch().communicate(timeout=patiently(START_SECONDS))
    output += launched.communicate(timeout=patiently(END_SECONDS))[0][-2000:]  # shown when something is missing
    lines = output.splitlines()
    assert lines[0].startswith("watched  stage1.1  ")
    assert any("running" in line and "engines" in line for line in lines), output
    assert any(line.startswith(f"watched  stage1.1  done  step {NUM_STEPS} of {NUM_STEPS}") for line in lines), output
    code, done = status(runs.results)
    assert (code, done["state"], done["saved_step"]) == (0, "done", NUM_STEPS)


def test_the_simulator_gives_the_step_time_of_the_run_whose_speeds_it_has(runs: Runs) -> None:
    """A synchronous step is waiting, training and pushing: the simulation must find their shares again.

    How busy the engine was is compared in tests/unit/tools/sizing/test_calibrate.py alone: while other programs use the
    cores, much of a rollout's time is the driver's.
    """
    run = load_run(runs.run_dir)
    found = measured(run)
    predicted = forecast(measured_loop(run, max_age=0), seed=0, num_steps=30)
    print(found, predicted)
    assert predicted.step_seconds == pytest.approx(found.step_seconds, rel=0.3)
    assert predicted.policy_waits == pytest.approx(found.policy_waits, abs=0.2)
    assert found.policy_waits > 0.2


def test_a_job_in_the_queue_then_running_then_cancelled(slurm_cluster: Cluster, tmp_path: Path) -> None:
    def ask() -> str:
        command = [sys.executable, "-m", "tools.look.status", "--results", str(tmp_path), "--exp-name", "queued"]
        return slurm_cluster.run(command, cwd=ROOT, check=False).stdout

    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER, encoding="utf-8")
    (tmp_path / "queued").mkdir()
    submit = ["sbatch", "--parsable", "--hold", "--job-name=queued", "--nodes=2", f"--output={tmp_path}/out"]
    words = [sys.executable, str(driver), str(tmp_path / "queued")]
    job = slurm_cluster.run([*submit, f"--chdir={ROOT}", f"--wrap={' '.join(words)}"]).stdout.strip()
    assert f"queued  queued  step 0\n  state     Slurm job {job} PENDING (JobHeldUser), 2 nodes" in ask()
    slurm_cluster.run(["scontrol", "release", job])
    slurm_cluster.wait_until(lambda: "driver has not started" in ask(), "running job", seconds=30)
    assert f"Slurm job {job} RUNNING on 2 nodes (head n1)" in ask()
    (tmp_path / "go").touch()
    slurm_cluster.wait_until(lambda: "on n1, started" in ask(), "a driver that beats", seconds=120)
    assert f"Slurm job {job} RUNNING on 2 nodes (head n1)" in ask()
    slurm_cluster.run(["scancel", "--signal=KILL", "--full", job])
    slurm_cluster.wait_until(lambda: "DEAD" in ask(), "the end of the driver", seconds=30)
    assert "wrote no last word" in ask()
