"""Locks of the tools: one process at a time, also on a file system that has no locks."""

from __future__ import annotations

import errno
import fcntl

import pytest

from recipes.errors import LaunchError
from tools.locks import only_one, try_lock


def no_locks(number):
    def refuse(_file, _kind):
        raise OSError(number, "refused")

    return refuse


def test_a_second_process_is_refused(tmp_path):
    with (tmp_path / ".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="another process holds this lock"), only_one(tmp_path / ".lock"):
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_the_work_is_done_on_a_file_system_without_locks(tmp_path, monkeypatch, capsys, number):
    """As on Lustre that is mounted without `-o flock`."""
    monkeypatch.setattr(fcntl, "flock", no_locks(number))
    done = []
    with only_one(tmp_path / ".lock"):
        done.append(1)
    assert done
    assert "this file system has no locks" in capsys.readouterr().out


def test_another_failure_is_not_taken_for_a_second_process(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks(errno.EIO))
    with (tmp_path / "file").open("ab") as file, pytest.raises(OSError, match="refused"):
        try_lock(tmp_path / "file", file)
