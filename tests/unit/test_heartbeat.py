"""What status.json says while a run goes and after it ended."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from recipes import heartbeat
from recipes.config.tree import DeadlinesConfig
from recipes.errors import StalledError
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.metrics import StepMetrics
from recipes.heartbeat import Heartbeat, process_start, standing_still
from recipes.types import Group, PromptRef
from tests.configuration import block, config

NAMES = ("placement", "engine_start", "generation", "rollout", "refit", "train", "checkpoint", "progress", "shutdown")
DEADLINES = DeadlinesConfig(**dict.fromkeys(NAMES, 60.0))


def make_run(*, reason: str = "", in_flight: int = 3) -> Any:
    """Return a run in step 5, with one group of step 5 and two of step 6 in its buffer."""
    buffer = ReplayBuffer(num_prompts_per_step=2, max_trajectory_age_steps=1)
    for row, target in enumerate((4, 5, 5)):
        ref = PromptRef(epoch=0, row_index=row, prompt_id="p")
        buffer.add(Group(prompt=ref, agent="a", prompt_text="", target_step=target, version=4, rollouts=()))
    return SimpleNamespace(
        state=SimpleNamespace(step=4, saved_step=2),
        num_steps=60,
        recorder=SimpleNamespace(metrics=StepMetrics(5, clock=iter((100.0, 107.5, 107.5)).__next__)),
        buffer=buffer,
        collector=SimpleNamespace(
            num_in_flight=lambda: in_flight, waiting_for=lambda: "oldest in flight: x", paused=dict, num_set_aside=int
        ),
        stop=SimpleNamespace(reason=reason),
        missing=lambda: {"generation engine 1": "start 1 of 3 failed: no memory"},
        is_complete=not reason,
        shortfall="",
        config=config(
            grpo=block(
                "grpo",
                num_prompts_per_step=2,
                async_grpo=block("grpo.async_grpo", enabled=True, max_trajectory_age_steps=1),
                max_num_steps=60,
            )
        ),
    )


def read(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    return content


def test_it_says_the_phase_and_who_waits(tmp_path):
    run = make_run()
    with Heartbeat(tmp_path, DEADLINES) as beating, run.recorder.metrics.timed("exposed_generation"):
        beating.watch(run)
        found = heartbeat.observe(run)
    assert (found["phase"], found["phase_seconds"]) == ("exposed_generation", 7.5)
    assert found["ready"] == {"5": 1, "6": 2}
    assert found["missing"] == {"generation engine 1": "start 1 of 3 failed: no memory"}
    assert (found["step"], found["num_steps"], found["saved_step"], found["in_flight"]) == (4, 60, 2, 3)


def test_nothing_in_flight_waits_for_nothing():
    assert heartbeat.observe(make_run(in_flight=0))["waiting_for"] == ""


def test_it_beats_before_the_run_is_built_and_names_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "PERIOD_SECONDS", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with Heartbeat(tmp_path, DEADLINES):
        first = read(tmp_path)
        end = time.monotonic() + 10
        while read(tmp_path)["updated"] == first["updated"]:
            assert time.monotonic() < end, "no second beat"
            time.sleep(0.005)
    assert (first["state"], first["pid"], first["job_id"]) == ("starting", os.getpid(), "77")
    assert first["pid_started"] == process_start(os.getpid()) > 0


def test_a_beat_that_fails_is_not_the_last(tmp_path, caplog):
    run = make_run()
    asked = iter([RuntimeError("changed during iteration"), 3, 3, 3, 3, 3])

    def num_in_flight():
        answer = next(asked)
        if isinstance(answer, Exception):
            raise answer
        return answer

    run.collector.num_in_flight = num_in_flight
    run.recorder.metrics = StepMetrics(5)
    with Heartbeat(tmp_path, DEADLINES) as beating:
        beating.watch(run)
        beating._write("running")
        beating._write("running")
        assert read(tmp_path)["in_flight"] == 3
    assert "changed during iteration" in caplog.text


@pytest.mark.parametrize(("reason", "state"), [("", "done"), ("signal SIGTERM", "stopped")])
def test_the_last_beat_says_how_it_ended(tmp_path, reason, state):
    with Heartbeat(tmp_path, DEADLINES) as beating:
        beating.watch(make_run(reason=reason))
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == (state, reason)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failure_is_written_with_its_message_and_raised(tmp_path):
    with pytest.raises(StalledError), Heartbeat(tmp_path, DEADLINES) as beating:
        beating.watch(make_run())
        raise StalledError("step 5: nothing came")
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == ("failed", "StalledError: step 5: nothing came")


def test_a_run_directory_that_is_gone_does_not_end_the_run(tmp_path):
    (tmp_path / "gone").write_text("a file, in which nothing can be written", encoding="utf-8")
    with Heartbeat(tmp_path / "gone", DEADLINES) as beating:
        beating.watch(make_run())
    assert (tmp_path / "gone").is_file()


def test_no_process_has_no_start():
    assert process_start(2**22 + 1) == 0


STUCK = """
import dataclasses, sys, threading
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tests/unit"]
from recipes import heartbeat
from recipes.grpo.metrics import StepMetrics
from test_heartbeat import DEADLINES, make_run

heartbeat.PERIOD_SECONDS = 0.02
limits = dict(progress=0.1, refit=0.1, train=0.1, shutdown=0.1, placement=0.1, engine_start=0.1, checkpoint=0.1)
with heartbeat.Heartbeat(Path(sys.argv[1]), dataclasses.replace(DEADLINES, **limits)) as beating:
    if sys.argv[3] == "run":
        run = make_run()
        run.recorder.metrics = StepMetrics(5)
        beating.watch(run)
        with run.recorder.metrics.timed("policy_training"):
            threading.Semaphore(0).acquire()
    threading.Semaphore(0).acquire()
"""


@pytest.mark.parametrize(("when", "phase"), [("run", "step 5, phase policy_training"), ("start", "its start")])
def test_a_driver_in_which_nothing_moves_ends_and_says_where_it_stands(tmp_path: Path, when: str, phase: str) -> None:
    words = [sys.executable, "-c", STUCK, str(tmp_path), str(Path(__file__).resolve().parents[2]), when]
    done = subprocess.run(words, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == StalledError.exit_code, done.stderr
    found = read(tmp_path)
    assert found["state"] == "failed"
    assert phase in found["reason"]
    assert "nothing moved for" in found["reason"]
    is_run = when == "run"
    assert ("generation engine 1: start 1 of 3 failed: no memory" in found["reason"]) == is_run, "who is missing"


def test_a_driver_whose_node_ray_takes_for_dead_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls into Ray would wait for a raylet that stands still until the deadlines are over: hours, by default."""
    ended = threading.Event()
    monkeypatch.setattr(heartbeat, "NODE_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "standing_still", lambda: ["raylet (pid 7) is stopped (SIGSTOP)"])
    monkeypatch.setattr(os, "_exit", lambda _status: ended.set())
    nodes = [{"NodeID": "a", "Alive": False}, {"NodeID": "b", "Alive": True}]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "b"))
    with Heartbeat(tmp_path, DEADLINES) as beating:
        beating.watch(make_run())
        assert not ended.wait(0.2), "another node is dead"
        nodes[1]["Alive"] = False
        assert ended.wait(30)
        reason = read(tmp_path)["reason"]
    assert "Ray's head has had no answer of the raylet of this node for too long, in step 5" in reason
    assert "; raylet (pid 7) is stopped (SIGSTOP), generation engine 1: start 1 of 3 failed" in reason


def test_a_process_that_is_stopped_is_named() -> None:
    title = "ray::RolloutWorker"
    words = ["bash", "-c", f"exec -a {title} sleep 300"]
    with subprocess.Popen(words) as process:
        try:
            end = time.monotonic() + 30
            while psutil.Process(process.pid).cmdline()[:1] != [title]:
                assert time.monotonic() < end
                time.sleep(0.01)
            named = f"{title} (pid {process.pid}) is stopped (SIGSTOP)"
            assert named not in standing_still()
            process.send_signal(signal.SIGSTOP)
            while named not in standing_still():
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            process.kill()


def test_a_driver_that_moves_or_was_stopped_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(heartbeat, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "_MAX_BEAT_SECONDS", 0.02)  # of a beat that came late
    monkeypatch.setattr(os, "_exit", ended.append)
    limits = dataclasses.replace(DEADLINES, progress=0.1, refit=0.1, train=0.1, shutdown=0.1)
    run = make_run()
    run.recorder.metrics = StepMetrics(5)
    with Heartbeat(tmp_path, limits) as beating:
        beating.watch(run)
        for step in range(8):
            time.sleep(0.1)
            run.state.step = step
    assert not ended


def test_a_process_leaves_with_its_status_though_a_library_does_not_end(tmp_path: Path) -> None:
    code = "import atexit, sys, threading, recipes.stop as stop; atexit.register(threading.Semaphore(0).acquire)"
    code += "; stop.leave_within(0.2, 75); sys.exit(75)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 75
