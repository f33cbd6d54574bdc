"""The directory of Ray below /tmp: private, held while its program lives, cleared with its logs kept after that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from recipes.errors import LaunchError
from tests.ray_logs import write_logs
from tools.job import local, ray_temp
from tools.job.ray_temp import clear_abandoned, keep_logs, make_private, remove_sessions


def test_logs_are_kept_and_the_rest_is_removed(tmp_path):
    temp, target = tmp_path / "rl-7-0-ab", tmp_path / "logs" / "ray_n1"
    write_logs(temp)
    (temp / "ray" / "session_2026-01-01" / "logs").chmod(0o777)  # as Ray does
    keep_logs(temp, target)
    assert (target / "raylet.out").read_text(encoding="utf-8") == "x"
    assert target.stat().st_mode & 0o777 == 0o755
    assert not temp.exists()


def test_a_ray_that_did_not_start_leaves_nothing_to_the_next(tmp_path):
    write_logs(tmp_path)
    remove_sessions(tmp_path)
    assert list((tmp_path / "ray").iterdir()) == []


def test_the_directory_of_ray_is_private_and_nobody_elses(tmp_path):
    temp = tmp_path / "rl-7-0-ab"
    os.close(make_private(temp, logs=tmp_path / "ray"))
    assert temp.stat().st_mode & 0o777 == 0o700
    with pytest.raises(LaunchError, match="it exists already and belongs to user"):
        make_private(temp, logs=tmp_path / "ray")


def test_what_a_killed_program_left_is_cleared_and_its_logs_are_kept(tmp_path):
    """A directory is held as long as any process has the descriptor: the driver of a killed supervisor goes on."""
    temp, logs = tmp_path / "rl-7-0-ab", tmp_path / "logs" / "ray"
    lock = make_private(temp, logs=logs)
    write_logs(temp)
    logs.parent.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,)) as driver:
        os.close(lock)
        clear_abandoned(tmp_path)
        assert temp.exists()
        driver.communicate(b"\n")
    clear_abandoned(tmp_path)
    assert not temp.exists()
    assert (logs / "raylet.out").read_text(encoding="utf-8") == "x"


def test_what_is_left_of_a_removed_run_goes_without_its_logs(tmp_path):
    temp = tmp_path / "rl-7-0-ab"
    os.close(make_private(temp, logs=tmp_path / "removed" / "ray"))
    write_logs(temp)
    clear_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_made_is_not_cleared(tmp_path, monkeypatch):
    for name in ("rl-without-note", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    os.close(make_private(tmp_path / "elsewhere", logs=tmp_path / "none" / "ray"))
    (tmp_path / "rl-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "rl-file").touch()
    before = sorted(tmp_path.iterdir())
    clear_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    os.close(make_private(tmp_path / "rl-theirs", logs=tmp_path / "none" / "ray"))
    monkeypatch.setattr(ray_temp.os, "getuid", lambda: 12345)
    clear_abandoned(tmp_path)
    assert (tmp_path / "rl-theirs").exists()


def test_a_start_whose_empty_directory_was_cleared_makes_it_again(tmp_path, monkeypatch):
    temp, lock = tmp_path / "rl-7-0-ab", ray_temp.lock_directory

    def late(path):
        monkeypatch.setattr(ray_temp, "lock_directory", lock)
        taken = lock(path)
        path.rmdir()  # as `clear_abandoned` of another start would
        return taken

    monkeypatch.setattr(ray_temp, "lock_directory", late)
    os.close(make_private(temp, logs=tmp_path / "ray"))
    assert (temp / "logs_go_to").read_text(encoding="utf-8") == str(tmp_path / "ray")


def test_the_socket_of_ray_has_a_path_that_is_short_enough(tmp_path, monkeypatch):
    (tmp_path / "attempt_1").mkdir()
    temp, lock = local.make_temp(tmp_path / "attempt_1")
    try:
        assert (temp / "tmp").is_dir()
        # Ray appends session_<date>_<pid>/sockets/plasma_store; a Unix socket's path has at most 107 bytes.
        assert len(str(temp)) + len("/ray/session_2026-11-20_19-06-06_529727_4194304/sockets/plasma_store") <= 107
    finally:
        shutil.rmtree(temp)
        os.close(lock)
