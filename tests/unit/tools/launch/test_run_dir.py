"""One run of a name at a time; attempts never overwrite; what a killed start left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.grpo.errors import LaunchError
from tools.launch.local import make_temp
from tools.launch.run_dir import lock_problems, lock_run, new_attempt


def test_second_start_is_refused_and_names_the_first(tmp_path):
    run_dir = tmp_path / "run"
    lock = lock_run(run_dir)
    with pytest.raises(LaunchError, match=f"started by pid {os.getpid()} on"):
        lock_run(run_dir)
    assert len(lock_problems(run_dir)) == 1
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
    (first / "driver.log").write_text("kept")
    for _ in range(9):
        newest = new_attempt(tmp_path)
    assert newest.name == "attempt_10"  # counted, not sorted as text
    assert (tmp_path / "logs" / "latest").readlink() == Path("attempt_10")
    assert new_attempt(tmp_path).name == "attempt_11"
    assert (first / "driver.log").read_text() == "kept"


def test_temporary_directory_of_a_killed_start_is_removed(tmp_path):
    first = make_temp(tmp_path)
    (first / "socket").touch()
    second = make_temp(tmp_path)
    assert not first.exists()
    assert (second / "tmp").is_dir()
    # Ray appends session_<date>_<pid>/sockets/plasma_store; a Unix socket's path has at most 107 bytes.
    assert len(str(second)) + len("/session_2026-11-20_19-06-06_529727_4194304/sockets/plasma_store") <= 107
    assert len(list(tmp_path.iterdir())) == 1
    (second / "tmp").rmdir()
    second.rmdir()
