"""The state of a run from what it left behind: a heartbeat, jobs, metrics, checkpoints, a lock."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import InputError, LaunchError
from tools.draft import slurm
from tools.draft.slurm import Queue, SlurmJob, parse_ended, parse_queued, read_queue
from tools.look.run_state import (
    Checkpoint,
    Machine,
    RunStatus,
    ask_slurm,
    find_checkpoint,
    find_run,
    is_locked_here,
    judge,
    read_run,
)
from tools.look.status import advice, as_json, eta_seconds, headline, lines, plain, sparkline, waits
from tools.look.watch import changes, follow

NOW = 1000.0
PULSE: dict[str, Any] = {
    "state": "running",
    "reason": "",
    "pid": 5,
    "pid_started": 50,
    "host": "here",
    "pid_namespace": "pid:[1]",
    "job_id": "",
    "started": 900.0,
    "updated": 999.5,
    "step": 4,
    "num_steps": 60,
    "saved_step": 2,
    "phase": "policy_training",
    "phase_seconds": 0.5,
    "prompts_per_step": 16,
    "max_age": 1,
    "ready": {"6": 16},
    "in_flight": 0,
    "waiting_for": "",
}
ALIVE = Machine("here", "pid:[1]", {5: 50}.get, lambda _: True)  # type: ignore[arg-type]
GONE = Machine("here", "pid:[1]", lambda _: 0, lambda _: False)
ELSEWHERE = Machine("login", "pid:[1]", lambda _: 0, lambda _: False)


def job(**changed: str) -> SlurmJob:
    found = {"id": "77", "state": "RUNNING", "reason": "None", "num_nodes": "2", "elapsed": "1:45", "left": "3:55:00"}
    return SlurmJob(**{**found, "head": "n1", **changed})


def status(machine: Machine, queue: Queue | None = None, *, is_locked: bool = False, **changed: Any) -> RunStatus:
    return judge({**PULSE, **changed}, queue or Queue(), is_locked=is_locked, now=NOW, machine=machine)[0]


@pytest.mark.parametrize(
    ("machine", "queue", "changed", "expected"),
    [
        (ALIVE, Queue(), {}, RunStatus.RUNNING),
        (ALIVE, Queue(), {"state": "starting"}, RunStatus.STARTING),
        (ALIVE, Queue(), {"updated": 900.0}, RunStatus.SILENT),
        (ALIVE, Queue(), {"updated": 1100.0}, RunStatus.SILENT),  # its clock was set back after this beat
        (GONE, Queue(), {}, RunStatus.DEAD),
        (
            Machine("here", "pid:[1]", lambda _: 51, lambda _: False),
            Queue(),
            {},
            RunStatus.DEAD,
        ),  # another process has the id
        (Machine("here", "pid:[2]", lambda _: 0, lambda _: False), Queue(), {}, RunStatus.RUNNING),  # in a container
        (ELSEWHERE, Queue(), {}, RunStatus.RUNNING),
        (ELSEWHERE, Queue(), {"updated": 900.0}, RunStatus.DEAD),
        (ELSEWHERE, Queue(jobs=(job(),)), {"job_id": "77", "updated": 900.0}, RunStatus.SILENT),
        (ELSEWHERE, Queue(jobs=(job(state="NODE_FAIL"),)), {"job_id": "77"}, RunStatus.DEAD),
        (ELSEWHERE, Queue(has_answered=True), {"job_id": "77"}, RunStatus.DEAD),
        (ELSEWHERE, Queue(has_answered=True), {"job_id": "77", "state": "done"}, RunStatus.DONE),
        (ELSEWHERE, Queue(notes=("squeue did not answer",)), {"job_id": "77"}, RunStatus.RUNNING),
        (ELSEWHERE, Queue(jobs=(job(state="CANCELLED by 0"),)), {"job_id": "77"}, RunStatus.DEAD),
        (ELSEWHERE, Queue(jobs=(job(id="78"),)), {"job_id": "77", "state": "stopped"}, RunStatus.STARTING),
        # The driver started 100 s ago; its job, requeued, 20 s ago.
        (ELSEWHERE, Queue(jobs=(job(elapsed="0:20"),)), {"job_id": "77", "state": "stopped"}, RunStatus.STARTING),
        (ELSEWHERE, Queue(jobs=(job(elapsed="0:20"),)), {"job_id": "77", "updated": 950.0}, RunStatus.STARTING),
        # An answer of half a minute ago, of a job whose driver began soon.
        (ELSEWHERE, Queue(jobs=(job(elapsed="1:15"),), asked_at=NOW - 30), {"job_id": "77"}, RunStatus.RUNNING),
        (ELSEWHERE, Queue(jobs=(job(state="PENDING"),)), {"job_id": "77", "state": "stopped"}, RunStatus.QUEUED),
        (ELSEWHERE, Queue(jobs=(job(state="PENDING"),)), {"job_id": "77", "updated": 950.0}, RunStatus.QUEUED),
        (ELSEWHERE, Queue(jobs=(job(state="PENDING"),)), {"job_id": "77", "state": "done"}, RunStatus.DONE),
        (ELSEWHERE, Queue(jobs=(job(),)), {"job_id": "77", "state": "stopped"}, RunStatus.STOPPED),  # it still ends
        (ALIVE, Queue(), {"state": "done"}, RunStatus.DONE),
        (GONE, Queue(), {"state": "failed"}, RunStatus.FAILED),
        (GONE, Queue(), {"state": "stopped"}, RunStatus.STOPPED),
    ],
)
def test_verdicts(machine, queue, changed, expected):
    assert status(machine, queue, **changed) is expected


def test_a_new_start_of_an_ended_run_is_seen_by_its_lock():
    assert status(GONE, is_locked=True, state="done") is RunStatus.STARTING
    assert status(ALIVE, is_locked=True, state="done") is RunStatus.DONE  # the driver that wrote it still ends


def test_without_a_pulse_only_jobs_and_locks_can_tell():
    pending = Queue(jobs=(job(state="PENDING", reason="Priority"),))
    assert judge({}, pending, is_locked=False, now=NOW, machine=GONE) == (
        RunStatus.QUEUED,
        "Slurm job 77 PENDING (Priority), 2 nodes",
    )
    assert judge({}, Queue(jobs=(job(),)), is_locked=False, now=NOW, machine=GONE)[0] is RunStatus.STARTING
    assert judge({}, Queue(), is_locked=True, now=NOW, machine=GONE)[0] is RunStatus.STARTING
    assert judge({}, Queue(), is_locked=False, now=NOW, machine=GONE)[0] is RunStatus.UNKNOWN


def make_run(run_dir: Path, **changed: Any) -> Path:
    """Write a run of four steps, with a checkpoint of step 2, as the driver leaves it."""
    run_dir.mkdir(parents=True)
    (run_dir / "status.json").write_text(json.dumps({**PULSE, **changed}), encoding="utf-8")
    config = {"grpo": {"max_num_steps": 60, "async_grpo": {"max_trajectory_age_steps": 1}}}
    config["checkpointing"] = {"save_period": 2}
    (run_dir / "resolved.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    (run_dir / "run.lock.json").write_text('{"stage": "stage1.1"}', encoding="utf-8")
    records = [{"step": 0, "time": 950.0, "validation/accuracy": 0.25}]
    for step in range(1, 5):
        records.append(
            {
                "step": step,
                "time": 950.0 + 10 * step,
                "train/reward": step / 10,
                "train/num_rollouts": 8.0,
                "train/rollout_status/timed_out": 1.0 if step == 3 else 0.0,
                "train/avg_trajectory_age": 1.0,
                "train/max_trajectory_age": 1.0,
                "timing/train/policy_training": 6.0,
                "timing/train/exposed_generation": 4.0,
                "timing/train/total_step_time": 10.0,
                "idle/generation": 0.5,
            }
        )
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "metrics.jsonl").write_text(text + '{"step": 5, "ti', encoding="utf-8")  # a line being written
    for step in (2, 4):
        (run_dir / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    mark = run_dir / "checkpoints/step_000002/COMPLETE"
    mark.touch()
    os.utime(mark, (970.0, 970.0))
    copy = run_dir / "checkpoints/step_000003.bak"  # a user's own
    copy.mkdir()
    (copy / "COMPLETE").touch()
    (run_dir / "logs/attempt_1").mkdir(parents=True)
    (run_dir / "logs/attempt_1/driver.log").write_text("fine\n\nEngineError: engine 3 died\n", encoding="utf-8")
    (run_dir / "logs/latest").symlink_to("attempt_1")
    return run_dir


def test_a_long_step_counts_for_as_much_of_the_engines_time_as_it_takes(tmp_path):
    """As in the report: a share of the time, not a mean over steps."""
    run_dir = make_run(tmp_path / "mine")
    long = {
        "step": 5,
        "timing/train/policy_training": 60.0,
        "timing/train/total_step_time": 60.0,
        "idle/generation": 0.0,
    }
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:-1]
    (run_dir / "metrics.jsonl").write_text(
        "\n".join([*lines, json.dumps({"time": 995.0, **long})]) + "\n", encoding="utf-8"
    )
    assert "engines idle 20%" in plain(read_run(run_dir, Queue(), machine=ALIVE, now=NOW))


def test_a_running_run_says_all_that_is_asked_for(tmp_path):
    state = read_run(make_run(tmp_path / "mine"), Queue(), machine=ALIVE, now=NOW)
    assert headline(state) == "mine  stage1.1  running  step 4 of 60"
    assert (state.saved_step, state.attempt) == (2, "attempt_1")  # step 4 has no COMPLETE
    assert eta_seconds(state) == 560.0  # 56 steps of 10 s
    text = plain(state)
    for expected in (
        "10.0 s a step (median of the last 4), last logged 10.0 s ago, ends in about 9 min 20 s",
        "0.400, last 4 steps 0.250",
        "0.250 at step 0",
        "groups 1.0 steps old, the oldest 1 (limit 1)",
        "1 of 32 rollouts without a verdict (1 timed_out)",
        "step 2, 30.0 s ago, next at step 6",
        "train 60%, wait 40%; engines idle 50%",
        "policy is busy since 0.5 s: policy_training of step 5",
        "engines wait for the policy: all groups that they may start are sampled (16 for step 6)",
    ):
        assert expected in text, text
    assert "EngineError" not in text  # the log speaks only when something is wrong
    assert state.status.exit_code == 0


@pytest.mark.parametrize(("left", "is_short"), [("9:00", True), ("9:30", False), ("1-00:00:00", False)])
def test_an_end_that_lies_beyond_the_job_is_said(tmp_path, left, is_short):
    queue = Queue(jobs=(job(left=left),))
    state = read_run(make_run(tmp_path / "mine", job_id="77"), queue, machine=ALIVE, now=NOW)  # 9 min 20 s to go
    assert ("more than this job has left" in plain(state)) is is_short


def test_waiting_names_what_is_waited_for(tmp_path):
    oldest = "oldest in flight: prompt 0:7:ab for step 5 since 42 s, prompt 0:8:cd for step 5 since 41 s"
    changed = {"phase": "exposed_generation", "phase_seconds": 40.0, "ready": {"5": 12}, "in_flight": 4}
    run_dir = make_run(tmp_path / "mine", **changed, waiting_for=oldest)
    assert waits(read_run(run_dir, Queue(), machine=ALIVE, now=NOW)) == [
        "policy waits for the engines since 40.0 s: step 5 has 12 of 16 groups",
        "engines sample 4 groups; oldest in flight: prompt 0:7:ab for step 5 since 42 s",
    ]


def test_a_paused_environment_is_named_with_what_waits_for_it(tmp_path):
    run_dir = make_run(tmp_path / "mine", paused={"code": 90.0}, set_aside=7)
    text = plain(read_run(run_dir, Queue(), machine=ALIVE, now=NOW))
    assert "code for 1 min 30 s: too many rollouts without a verdict; 7 prompts wait" in text
    assert "prompts wait" not in plain(read_run(make_run(tmp_path / "other"), Queue(), machine=ALIVE, now=NOW))


def test_engines_that_are_not_up_are_named_with_the_reason(tmp_path):
    missing = {"generation engine 3": "start 3 of 3 failed on node n2: no memory", "rollout worker 0": "no answer"}
    run_dir = make_run(tmp_path / "mine", missing=missing)
    state = read_run(run_dir, Queue(), machine=ALIVE, now=NOW)
    assert "missing   generation engine 3: start 3 of 3 failed on node n2: no memory" in plain(state)
    assert "rollout worker 0: no answer" in plain(state)
    assert as_json(state)["missing"] == missing
    assert "missing" not in plain(read_run(make_run(tmp_path / "other"), Queue(), machine=ALIVE, now=NOW))


def test_a_phase_that_takes_far_too_long_is_pointed_out(tmp_path):
    state = read_run(make_run(tmp_path / "mine", phase_seconds=100.0), Queue(), machine=ALIVE, now=NOW)
    assert waits(state)[0].endswith("of step 5 (usually 6.0 s)")


def test_a_dead_run_says_so_with_its_last_words_and_what_a_restart_costs(tmp_path):
    state = read_run(make_run(tmp_path / "mine"), Queue(), machine=GONE, now=NOW)
    assert (state.status, state.status.exit_code) == (RunStatus.DEAD, 1)
    assert headline(state).startswith("mine  stage1.1  DEAD")
    assert "pid 5 on here) is gone" in state.why
    assert [line.text for line in lines(state)][-2:] == [
        "EngineError: engine 3 died",
        "start it again: it resumes after step 2, 2 steps are trained again",
    ]
    assert waits(state) == []
    assert as_json(state)["eta_seconds"] is None


def test_a_failed_run_gives_its_reason(tmp_path):
    run_dir = make_run(tmp_path / "mine", state="failed", reason="EngineError: engine 3 died")
    state = read_run(run_dir, Queue(), machine=GONE, now=NOW)
    assert (state.status, state.why) == (RunStatus.FAILED, "EngineError: engine 3 died")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("EngineError: engine 3 died", "start it again: it resumes after step 2"),
        ("ConfigError: grpo.seed: got 7, expected 42", "correct what the state names, then start it again: it resumes"),
    ],
)
def test_a_wrong_input_is_to_be_corrected_before_the_next_start(tmp_path, reason, expected):
    run_dir = make_run(tmp_path / "mine", state="failed", reason=reason)
    assert advice(read_run(run_dir, Queue(), machine=GONE, now=NOW)).startswith(expected)


def test_the_command_for_a_report_names_another_place_of_results(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "my results" / "mine", state="done")
    state = read_run(run_dir, Queue(), machine=GONE, now=NOW)
    assert advice(state) == f"make report EXP_NAME=mine RESULTS_DIR='{tmp_path}/my results'"
    (tmp_path / "results").symlink_to("my results")
    monkeypatch.chdir(tmp_path)
    assert advice(state) == "make report EXP_NAME=mine"


def test_a_run_of_before_there_was_a_pulse(tmp_path):
    run_dir = make_run(tmp_path / "mine")
    (run_dir / "status.json").unlink()
    state = read_run(run_dir, Queue(), machine=GONE, now=NOW)
    assert state.status is RunStatus.UNKNOWN
    (run_dir / "resolved.json").write_text('{"config": {"grpo": {"max_num_steps": 4}}}', encoding="utf-8")
    assert read_run(run_dir, Queue(), machine=GONE, now=NOW).status is RunStatus.DONE


def test_a_run_that_has_only_a_pulse(tmp_path):
    run_dir = tmp_path / "new"
    run_dir.mkdir()
    keys = ("state", "reason", "pid", "pid_started", "host", "pid_namespace", "job_id", "started", "updated")
    (run_dir / "status.json").write_text(
        json.dumps({key: PULSE[key] for key in keys} | {"state": "starting"}), encoding="utf-8"
    )
    state = read_run(run_dir, Queue(), machine=ALIVE, now=NOW)
    assert headline(state) == "new  starting  step 0"
    assert advice(state) == ""


def test_the_newest_run_is_taken_and_a_wrong_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for age, name in enumerate(("old", "new")):
        make_run(tmp_path / name)
        for mark in ("status.json", "metrics.jsonl"):
            os.utime(tmp_path / name / mark, (age + 1.0, age + 1.0))
    (tmp_path / "not-a-run").mkdir()
    assert find_run(tmp_path, "") == tmp_path / "new"
    assert find_run(tmp_path, "old") == tmp_path / "old"
    with pytest.raises(LaunchError, match="choose from: new, old"):
        find_run(tmp_path, "odl")
    with pytest.raises(LaunchError, match="make smoke"):
        find_run(tmp_path / "empty", "")


def test_a_held_lock_is_seen_and_not_taken(tmp_path):
    assert not is_locked_here(tmp_path)
    with (tmp_path / ".lock").open("w") as lock:
        assert not is_locked_here(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_locked_here(tmp_path)


def test_lines_of_squeue_and_sacct():
    queued = parse_queued("77|RUNNING|None|183|1:02:03|2:57:57|n001")
    assert str(queued) == "Slurm job 77 RUNNING on 183 nodes (head n001), 1:02:03 used, 2:57:57 left"
    ended = parse_ended("77|NODE_FAIL|0:15|183|00:10:00")
    assert str(ended) == "Slurm job 77 NODE_FAIL on 183 nodes after 00:10:00 (exit code 0:15)"
    assert ended.is_over and not queued.is_over


def write_program(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_slurm_is_asked_for_the_name_and_then_for_an_ended_job(tmp_path, monkeypatch):
    listed = "echo '78|PENDING|Dependency|2|0:00|4:00:00|n/a'"
    mine = f"*--user={os.getuid()}*--name=mine*"  # others may have jobs of this name
    write_program(tmp_path, "squeue", f"case $* in {mine}) {listed} ;; *) echo Invalid job id >&2; exit 1 ;; esac")
    write_program(tmp_path, "sacct", "echo '77|TIMEOUT|0:0|2|04:00:00'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    queue = read_queue("mine", "77")
    assert [(job.id, job.state) for job in queue.jobs] == [("78", "PENDING"), ("77", "TIMEOUT")]
    assert queue.running is None and queue.pending is not None and queue.pending.head == ""
    assert queue.has_answered and queue.notes == ()  # that squeue has forgotten a job is no failure


def test_a_job_that_ended_minutes_ago_needs_no_accounting(tmp_path, monkeypatch):
    ended = "echo '77|FAILED|NonZeroExitCode|2|0:20|3:59:40|n1'"
    write_program(tmp_path, "squeue", f"case $* in *--jobs=77*) {ended} ;; esac")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    queue = read_queue("mine", "77")
    assert str(queue.jobs[0]) == "Slurm job 77 FAILED on 2 nodes after 0:20 (NonZeroExitCode)"
    assert queue.running is None


def test_a_controller_that_does_not_answer_is_a_note(tmp_path, monkeypatch):
    write_program(tmp_path, "squeue", "exec sleep 20")
    write_program(tmp_path, "sacct", "echo broken >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.1)
    assert read_queue("mine", "77").notes == ("squeue did not answer within 0.1 s", "sacct failed: broken")


def test_slurm_is_not_asked_about_a_local_run(tmp_path, monkeypatch):
    write_program(tmp_path, "squeue", "echo '78|RUNNING|None|2|0:00|4:00:00|n1'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    run_dir = make_run(tmp_path / "mine")
    assert ask_slurm(run_dir) == Queue()
    (run_dir / "logs/slurm-78.log").touch()
    assert ask_slurm(run_dir).running is not None


def test_following_ends_with_the_run_and_asks_the_controller_rarely(tmp_path):
    run_dir = make_run(tmp_path / "mine")
    asked, clock, reads = [], iter(range(0, 10000, 10)), iter(range(7))

    def read(queue: Queue) -> Any:
        machine = ALIVE if next(reads) < 6 else GONE
        return read_run(run_dir, queue, machine=machine, now=NOW)

    def ask() -> Queue:
        asked.append(1)
        return Queue()

    states = follow(read, ask, clock=lambda: float(next(clock)), sleep=lambda _: None)
    printed = [text for _, text in changes(states)]
    assert len(printed) == 2  # six times the same, then the end
    assert printed[0].startswith("mine  stage1.1  running  step 4 of 60  saved step 2  policy is busy")
    assert printed[1].startswith("mine  stage1.1  DEAD")
    assert len(asked) == 3  # at the start, and after 30 s and 60 s of 10 s each


def test_sparkline():
    assert sparkline([1.0]) == ""
    assert sparkline([0.0, 1.0, 0.5]) == "\u2581\u2588\u2585"
    assert len(sparkline([float(value) for value in range(1000)])) <= 24


def test_a_last_step_without_a_gradient_is_said(tmp_path):
    run_dir = make_run(tmp_path / "mine")
    assert "scored alike" not in plain(read_run(run_dir, Queue(), machine=ALIVE, now=NOW))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[:-1]
    flat = {"train/num_groups": 2.0, "train/num_groups_zero_variance": 2.0}
    lines[-1] = json.dumps(json.loads(lines[-1]) | flat)
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "step 4: 2 of 2 groups scored alike: no gradient" in plain(
        read_run(run_dir, Queue(), machine=ALIVE, now=NOW)
    )


def test_before_the_rows_are_counted_nobody_knows_the_number_of_steps(tmp_path):
    """The configuration asks for 60; the rows may suffice for fewer, and the driver says so once it is up."""
    run_dir = make_run(tmp_path / "mine", state="starting")
    heartbeat = json.loads((run_dir / "status.json").read_text())
    for counted, said in ((None, "step 4"), (1, "step 4 of 1")):
        told = {name: value for name, value in heartbeat.items() if name != "num_steps"}
        (run_dir / "status.json").write_text(json.dumps(told | ({"num_steps": counted} if counted else {})))
        assert headline(read_run(run_dir, Queue(), machine=ALIVE, now=NOW)).endswith(said)


def test_a_checkpoint_is_found_by_its_run_its_step_or_its_export(tmp_path: Path) -> None:
    run, start, rows = tmp_path / "run", tmp_path / "start", tmp_path / "val.jsonl"
    for step in (2, 10):
        export = run / "checkpoints" / f"step_{step:06d}" / "hf"
        export.mkdir(parents=True)
        (export / "config.json").write_text("{}", encoding="utf-8")
        (export.parent / "COMPLETE").write_text("{}", encoding="utf-8")
    start.mkdir()
    (start / "config.json").write_text("{}", encoding="utf-8")
    rows.touch()
    resolved = {
        "files": ["configs/grpo_base.yaml", "configs/tiny/wide.yaml"],
        "config": {"data": {"validation": {"data_path": str(rows)}}},
    }
    (run / "resolved.json").write_text(json.dumps(resolved), encoding="utf-8")
    (run / "run.lock.json").write_text(json.dumps({"model": {"path": str(start)}}), encoding="utf-8")
    (run / "checkpoints" / "latest").symlink_to("step_000010")
    found = find_checkpoint(run)
    assert (found.model, found.name, found.trained_from, found.rows) == (export, "run-step_000010", start, rows)
    assert found.config is not None and found.config.name == "wide.yaml"
    for other in (export.parent, export, run / "checkpoints" / "latest" / "hf"):
        assert find_checkpoint(other) == found
    assert find_checkpoint(start) == Checkpoint(model=start, name="start")
    (start / "config.json").unlink()
    (run / "resolved.json").unlink()
    assert find_checkpoint(run) == Checkpoint(model=export, name="run-step_000010")
    with pytest.raises(InputError, match=r"CHECKPOINT: .*is no run with a checkpoint"):
        find_checkpoint(start)
