"""One run of a name at a time; attempts never overwrite."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from recipes.errors import LaunchError
from tools.draft.run_dir import Holder, RunInProgressError, lock_problems, lock_run, new_attempt, read_holder


def test_second_start_is_refused_and_names_the_first(tmp_path):
    run_dir = tmp_path / "run"
    lock = lock_run(run_dir)
    with pytest.raises(LaunchError, match=f"started by pid {os.getpid()} on"):
        lock_run(run_dir)
    assert len(lock_problems(run_dir)) == 1
    assert (run_dir / ".lock").stat().st_mode & 0o777 == 0o600, "whoever can open it can lock the run"
    os.close(lock)
    assert lock_problems(run_dir) == []


def test_lock_outlives_its_owner_as_long_as_a_driver_has_it(tmp_path):
    lock = lock_run(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,)) as driver:
        os.close(lock)
        assert len(lock_problems(tmp_path)) == 1
        driver.communicate(b"\n")
    assert lock_problems(tmp_path) == []


def test_looking_at_a_run_that_never_was_creates_nothing(tmp_path):
    assert lock_problems(tmp_path / "run") == []
    assert not (tmp_path / "run").exists()


def test_attempts_are_numbered_and_latest_points_at_the_newest(tmp_path):
    first = new_attempt(tmp_path)
    (first / "driver.log").write_text("kept", encoding="utf-8")
    for _ in range(9):
        newest = new_attempt(tmp_path)
    assert newest.name == "attempt_10"  # counted, not sorted as text
    assert (tmp_path / "logs" / "latest").readlink() == Path("attempt_10")
    (tmp_path / "logs" / "attempt_x").mkdir()  # a user's own name
    assert new_attempt(tmp_path).name == "attempt_11"
    assert (first / "driver.log").read_text(encoding="utf-8") == "kept"


def test_lock_says_which_job_on_which_host_has_it(tmp_path, monkeypatch):
    assert read_holder(tmp_path) is None
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    lock = lock_run(tmp_path)
    holder = read_holder(tmp_path)
    assert holder == Holder(pid=os.getpid(), host=socket.gethostname(), job_id="42", started=holder.started)
    assert abs(holder.started - time.time()) < 60
    (problem,) = lock_problems(tmp_path)
    assert f"started by job 42, pid {os.getpid()} on {socket.gethostname()}" in problem.what
    os.close(lock)


def test_requeued_job_waits_for_its_own_last_start_and_another_job_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    first = lock_run(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="started by job 42"):
        lock_run(tmp_path)
    assert time.monotonic() - begin < 5  # of the 180 s that it would wait for its own
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    with pytest.raises(LaunchError, match="started by job 42"):
        lock_run(tmp_path, own_seconds=0.0)
    closer = threading.Timer(0.2, os.close, [first])
    closer.start()
    second = lock_run(tmp_path, own_seconds=60.0)
    closer.join()
    os.close(second)


def test_a_later_start_of_a_job_takes_over_the_lock_of_a_lost_node(tmp_path, monkeypatch, capsys):
    """The descriptor that stays open stands for the lock that a file server keeps for a node which is gone."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lost = lock_run(tmp_path)
    with pytest.raises(RunInProgressError, match="in progress"):
        lock_run(tmp_path, own_seconds=0.0)  # the same start, twice
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    second = lock_run(tmp_path, own_seconds=0.0)
    assert "taken over from restart 1 of this job" in capsys.readouterr().out
    assert read_holder(tmp_path).restart == 2
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    with pytest.raises(RunInProgressError, match="started by job 42"):
        lock_run(tmp_path)
    os.close(second)
    os.close(lock_run(tmp_path))  # the lost one holds nothing any more
    os.close(lost)


def test_stale_record_of_an_ended_run_is_no_lock(tmp_path):
    os.close(lock_run(tmp_path))
    assert read_holder(tmp_path) is not None
    os.close(lock_run(tmp_path))


def test_file_system_without_locks_still_records_the_job(tmp_path, monkeypatch):
    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    os.close(lock_run(tmp_path))
    assert lock_problems(tmp_path) == []
    assert read_holder(tmp_path).job_id == "42"
