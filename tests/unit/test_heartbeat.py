"""What status.json says while a run goes and after it ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import heartbeat
from recipes.errors import StalledError
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.metrics import StepMetrics
from recipes.heartbeat import Heartbeat, process_start
from recipes.types import Group, PromptRef


def make_run(*, reason: str = "", in_flight: int = 3) -> Any:
    """Return a run in step 5, with one group of step 5 and two of step 6 in its buffer."""
    buffer = ReplayBuffer(num_prompts_per_step=2, max_trajectory_age_steps=1)
    for row, target in enumerate((4, 5, 5)):
        ref = PromptRef(epoch=0, row_index=row, prompt_id="p")
        buffer.add(Group(prompt=ref, agent="a", prompt_text="", target_step=target, version=4, rollouts=()))
    return SimpleNamespace(
        state=SimpleNamespace(step=4, saved_step=2),
        num_steps=60,
        metrics=StepMetrics(5, clock=iter((100.0, 107.5, 107.5)).__next__),
        buffer=buffer,
        collector=SimpleNamespace(
            num_in_flight=lambda: in_flight, waiting_for=lambda: "oldest in flight: x", paused=dict, num_set_aside=int
        ),
        stop=SimpleNamespace(reason=reason),
        is_complete=not reason,
        config=SimpleNamespace(
            grpo=SimpleNamespace(
                num_prompts_per_step=2,
                async_grpo=SimpleNamespace(enabled=True, max_trajectory_age_steps=1),
                max_num_steps=60,
            )
        ),
    )


def read(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return content


def test_it_says_the_phase_and_who_waits(tmp_path):
    run = make_run()
    with Heartbeat(tmp_path) as pulse, run.metrics.timed("exposed_generation"):
        pulse.watch(run)
        found = heartbeat.observe(run)
    assert (found["phase"], found["phase_seconds"]) == ("exposed_generation", 7.5)
    assert found["ready"] == {"5": 1, "6": 2}
    assert (found["step"], found["num_steps"], found["saved_step"], found["in_flight"]) == (4, 60, 2, 3)


def test_nothing_in_flight_waits_for_nothing():
    assert heartbeat.observe(make_run(in_flight=0))["waiting_for"] == ""


def test_it_beats_before_the_run_is_built_and_names_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "PERIOD_SECONDS", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with Heartbeat(tmp_path):
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
    run.metrics = StepMetrics(5)
    with Heartbeat(tmp_path) as pulse:
        pulse.watch(run)
        pulse._write("running")
        pulse._write("running")
        assert read(tmp_path)["in_flight"] == 3
    assert "changed during iteration" in caplog.text


@pytest.mark.parametrize(("reason", "state"), [("", "done"), ("signal SIGTERM", "stopped")])
def test_the_last_beat_says_how_it_ended(tmp_path, reason, state):
    with Heartbeat(tmp_path) as pulse:
        pulse.watch(make_run(reason=reason))
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == (state, reason)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failure_is_written_with_its_message_and_raised(tmp_path):
    with pytest.raises(StalledError), Heartbeat(tmp_path) as pulse:
        pulse.watch(make_run())
        raise StalledError("step 5: nothing came")
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == ("failed", "StalledError: step 5: nothing came")


def test_a_run_directory_that_is_gone_does_not_end_the_run(tmp_path):
    (tmp_path / "gone").write_text("a file, in which nothing can be written")
    with Heartbeat(tmp_path / "gone") as pulse:
        pulse.watch(make_run())
    assert (tmp_path / "gone").is_file()


def test_no_process_has_no_start():
    assert process_start(2**22 + 1) == 0
