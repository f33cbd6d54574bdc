"""Begin a start: the parent's export is found and checked, the lock is inherited, a live job is not run beside."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.errors import CheckpointError, LaunchError
from tools.draft import slurm as queue
from tools.draft.provenance import data_digest
from tools.draft.run_dir import lock_problems, lock_run
from tools.draft.slurm import LiveJob, live_jobs, read_queue, run_problems
from tools.job import begin
from tools.job.begin import refuse_beside, require_same_data, with_start_weights


def write_checkpoint(root: Path, step: int, weights: bytes) -> Path:
    path = root / f"step_{step:06d}"
    (path / "hf").mkdir(parents=True)
    (path / "hf" / "config.json").write_text("{}", encoding="utf-8")
    (path / "hf" / "model.safetensors").write_bytes(weights)
    contents = {f"hf/{file.name}": file.read_bytes() for file in (path / "hf").iterdir()}
    files = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in contents.items()
    }
    (path / "COMPLETE").write_text(json.dumps(files), encoding="utf-8")
    (root / "latest").unlink(missing_ok=True)
    (root / "latest").symlink_to(path.name)
    return path


def words(model: Path) -> list[str]:
    return ["python", "run_grpo.py", "policy.model_name=/first", f"policy.model_name={model}", "grpo.seed=3"]


def test_export_is_written_into_the_command_and_the_record(tmp_path, capsys):
    parent, run_dir = tmp_path / "a parent" / "checkpoints", tmp_path / "child"
    run_dir.mkdir()
    step = write_checkpoint(parent, 3, b"three")
    found = with_start_weights(run_dir, words(parent / "latest" / "hf"))
    assert found == (
        *("python", "run_grpo.py", "policy.model_name=/first"),
        f'policy.model_name="{step}/hf"',
        "grpo.seed=3",
    )
    assert f"start weights {step}/hf, complete" in capsys.readouterr().out
    model = json.loads((run_dir / "run.lock.json").read_text(encoding="utf-8"))["model"]
    content = hashlib.sha256(b"three").hexdigest()
    assert model["path"] == f"{step}/hf"
    assert model["weights_sha256"] == hashlib.sha256(f"model.safetensors 5 {content}\n".encode()).hexdigest()

    write_checkpoint(parent, 6, b"six..")
    again = with_start_weights(run_dir, words(parent / "latest" / "hf"))
    assert again[3] == f'policy.model_name="{parent}/step_000006/hf"'
    assert "differs from the last start: model.weights_sha256: was " in capsys.readouterr().out


def test_missing_and_damaged_exports_are_one_error(tmp_path):
    parent = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError) as missing:
        with_start_weights(tmp_path, words(parent / "latest" / "hf"))
    assert len(missing.value.problems) == 1
    step = write_checkpoint(parent, 3, b"three")
    (step / "hf" / "model.safetensors").write_bytes(b"thre")
    with pytest.raises(CheckpointError, match=r"model.safetensors: the file is missing or differs"):
        with_start_weights(tmp_path, words(parent / "latest" / "hf"))


def test_other_start_weights_and_commands_stay_as_they_are(tmp_path):
    for command in (words(Path("/models/sft")), ["python", "-c", "pass"]):
        assert with_start_weights(tmp_path, command) == tuple(command)
    assert not (tmp_path / "run.lock.json").exists()


def test_data_that_changed_since_the_launch_is_refused_at_each_start(tmp_path):
    paths = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
    for path in paths:
        path.write_text("row\n", encoding="utf-8")
    (tmp_path / "run.lock.json").write_text(
        json.dumps({"data": {path.name: data_digest(path) for path in paths}}), encoding="utf-8"
    )
    command = [
        "data.train.data_path=/elsewhere.jsonl",
        f"data.train.data_path={paths[0]}",
        f"data.validation.data_path='{paths[1]}'",
    ]
    require_same_data(tmp_path, command)
    require_same_data(tmp_path, [*command, "data.validation.data_path=null"])
    for path in paths:
        path.write_text("another row\n", encoding="utf-8")
    with pytest.raises(LaunchError) as caught:
        require_same_data(tmp_path, command)
    assert [problem.where for problem in caught.value.problems] == [str(path) for path in paths]
    require_same_data(tmp_path, [*command, "data.validation.data_path=null", "data.train.data_path=null"])


def test_data_that_is_gone_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("row\n", encoding="utf-8")
    (tmp_path / "run.lock.json").write_text(json.dumps({"data": {path.name: data_digest(path)}}), encoding="utf-8")
    path.unlink()
    with pytest.raises(LaunchError, match=r"train\.jsonl: no such file any more; restore the file"):
        require_same_data(tmp_path, [f"data.train.data_path={path}"])


def test_a_start_that_is_refused_leaves_the_record_of_the_job_that_lives(tmp_path, monkeypatch):
    def no_locks(_file, _kind):
        raise OSError(errno.ENOSYS, "as on Lustre without -o flock")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(begin, "live_jobs", lambda selection: [LiveJob(selection.removeprefix("--jobs="), "RUNNING")])
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    os.close(lock_run(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    for _ in range(2):  # a third job is refused, too
        with pytest.raises(LaunchError, match="job 42 of this run is RUNNING"):
            begin.lock_alone(tmp_path)


@pytest.fixture
def attempt(tmp_path):
    path = tmp_path / "run" / "logs" / "attempt_1"
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("squeue", "status", "message"),
    [
        ("echo '42|RUNNING'", 2, "EXP_NAME=run: job 42 of this run is RUNNING"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", 75, "run: job 42, pid "),
        ("exit 127", 75, "run: job 42, pid "),  # nobody knows: a later start asks again
    ],
)
def test_the_next_program_inherits_the_lock_and_a_refused_start_leaves_latest_alone(
    attempt, path_with_squeue, squeue, status, message
):
    shim(path_with_squeue, squeue)
    run_dir, refused_attempt = attempt.parent.parent, attempt.with_name("attempt_2")
    refused_attempt.mkdir()
    command = (sys.executable, "-m", "tools.job.begin", f"--log-dir={attempt}", "--", "sleep", "60")
    env = {**os.environ, "SLURM_JOB_ID": "42"}
    with subprocess.Popen(command, env=env) as first:
        try:
            while Path(f"/proc/{first.pid}/comm").read_text(encoding="utf-8").strip() != "sleep":
                assert first.poll() is None
            again = (*command[:3], f"--log-dir={refused_attempt}", *command[4:])
            refused = subprocess.run(
                again, env={**env, "SLURM_JOB_ID": "43"}, capture_output=True, text=True, timeout=60, check=False
            )
            assert refused.returncode == status
            assert message in refused.stderr
            assert attempt.with_name("latest").readlink() == Path("attempt_1")
        finally:
            first.kill()
    assert lock_problems(run_dir) == []
    subprocess.run([*again[:-2], "true"], env=env, timeout=60, check=True)
    assert attempt.with_name("latest").readlink() == Path("attempt_2")


def test_request_to_stop_ends_it_as_a_driver_that_has_nothing_to_save(attempt):
    run_dir = attempt.parent.parent
    lock = lock_run(run_dir)  # of the same job, so it waits for it
    (run_dir / ".lock").write_text(
        json.dumps({"pid": 1, "host": "n1", "job_id": "42", "started": 0.0}), encoding="utf-8"
    )
    command = (sys.executable, "-m", "tools.job.begin", f"--log-dir={attempt}", "--", "true")
    with subprocess.Popen(command, env={**os.environ, "SLURM_JOB_ID": "42"}) as waiting:
        handled = 1 << (signal.SIGUSR1 - 1)
        end = time.monotonic() + 30
        while int(caught(waiting.pid), 16) & handled == 0:
            assert waiting.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        waiting.send_signal(signal.SIGUSR1)
        assert waiting.wait(timeout=30) == 75
    os.close(lock)


def test_signals_are_held_until_the_next_program_takes_them(attempt):
    program = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    command = (sys.executable, "-m", "tools.job.begin", f"--log-dir={attempt}", "--", sys.executable, "-c", program)
    held = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        assert name in held


def caught(pid: int) -> str:
    """Return the mask of signals that a process handles, in hexadecimal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))


def shim(directory: Path, text: str) -> None:
    path = directory / "squeue"
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def path_with_squeue(tmp_path, monkeypatch):
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


@pytest.mark.parametrize("variable", ["SQUEUE_STATES", "SQUEUE_PARTITION", "SQUEUE_NAMES"])
def test_what_a_user_has_squeue_leave_out_is_asked_for_all_the_same(path_with_squeue, monkeypatch, variable):
    """Slurm 22.05 prints nothing of a running job with SQUEUE_STATES=PENDING, and no error."""
    shim(path_with_squeue, f'[[ -v {variable} ]] || echo "7|RUNNING|None|2|1:00|2:00|n1"')
    monkeypatch.setenv(variable, "PENDING")
    assert [job.job_id for job in live_jobs("--name=run")] == ["7"]
    assert [job.id for job in read_queue("run", "").jobs] == ["7"]


def test_jobs_in_partitions_that_are_hidden_are_asked_for(path_with_squeue):
    shim(path_with_squeue, '[[ " $* " != *" --all "* ]] || echo "7|RUNNING"')
    assert [job.job_id for job in live_jobs("--name=run")] == ["7"]


def test_live_job_of_the_name_is_refused_with_id_and_state(path_with_squeue, tmp_path, monkeypatch):
    log = tmp_path / "calls"
    shim(path_with_squeue, f'printf "%s\\n" "$*" >>"{log}"; echo "7|RUNNING"')
    (problem,) = run_problems("stage1.1-rlvr1", tmp_path / "run")
    assert str(problem) == (
        "EXP_NAME=stage1.1-rlvr1: job 7 of this run is RUNNING, and a name has one run at a time; "
        "wait for its end, or scancel 7, or choose another EXP_NAME"
    )
    assert (
        log.read_text(encoding="utf-8")
        == f"--noheader --all --format=%i|%T --user={os.getuid()} --name=stage1.1-rlvr1\n"
    )

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    os.close(lock_run(tmp_path / "run"))  # its directory records the same job: still one problem
    assert len(run_problems("stage1.1-rlvr1", tmp_path / "run")) == 1
    assert log.read_text(encoding="utf-8").splitlines()[-1].endswith("--jobs=7")


def test_ended_jobs_are_not_alive_and_no_answer_is_a_problem(path_with_squeue, tmp_path, monkeypatch):
    shim(path_with_squeue, "exit 0")
    assert run_problems("r", tmp_path) == []
    shim(path_with_squeue, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert live_jobs("--jobs=3") == []
    refuse_beside("r", "3")
    shim(path_with_squeue, "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(LaunchError, match="squeue: Unable to contact slurm controller"):
        run_problems("r", tmp_path)
    refuse_beside("r", "3")  # on the node the lock decides
    monkeypatch.setattr(queue, "DEADLINE_SECONDS", 0.2)
    shim(path_with_squeue, "exec sleep 30")
    with pytest.raises(LaunchError, match=r"squeue: it did not answer within 0\.2 s"):
        run_problems("r", tmp_path)


def test_no_slurm_means_no_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_problems("r", tmp_path) == []


def test_run_on_this_machine_refuses_a_job_of_it(path_with_squeue, tmp_path):
    shim(path_with_squeue, "exit 0")
    lock = lock_run(tmp_path / "r")
    (problem,) = run_problems("r", tmp_path / "r")
    assert "a run is in progress in" in problem.what
    os.close(lock)
    assert run_problems("r", tmp_path / "r") == []


def test_another_living_job_in_the_record_is_refused_where_locks_do_not_reach(path_with_squeue):
    shim(path_with_squeue, 'echo "9|RUNNING"')
    assert live_jobs("--jobs=9") == [LiveJob("9", "RUNNING")]
    with pytest.raises(LaunchError, match="job 9 of this run is RUNNING"):
        refuse_beside("r", "9")
    shim(path_with_squeue, 'echo "9|COMPLETING"')
    refuse_beside("r", "9")
