"""Where a process keeps its containers' files: where the user of the containers can pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.environments.swe.containers import places


@pytest.fixture
def open_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that everybody can pass through, as /tmp is."""
    path = tmp_path_factory.mktemp("open")
    for parent in (path, *path.parents):
        if parent.owner() == Path("/tmp").owner() and parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o711)
    return path


def test_a_private_temporary_directory_is_not_for_containers_of_another_user(open_directory, monkeypatch):
    private = open_directory / "run" / "tmp"
    private.mkdir(parents=True)
    monkeypatch.setattr(places, "confined_user", lambda: os.geteuid() + 1)
    assert places._parent(private) == private
    private.parent.chmod(0o700)  # as that of a run
    assert places._parent(private) == Path("/tmp")
    monkeypatch.setattr(places, "confined_user", os.geteuid)
    assert places._parent(private) == private


def test_a_process_that_leaves_has_no_directory_and_gets_a_new_one(open_directory, monkeypatch):
    monkeypatch.setattr(places, "_homes", {})
    monkeypatch.setattr(places, "_parent", lambda _: open_directory)
    places.leave()  # a worker that ran no container
    first = places.home()
    (first / "container-1").mkdir()
    assert places.home() == first
    places.leave()
    assert list(open_directory.iterdir()) == []
    assert places.home() != first
    places.leave()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_kept(open_directory, monkeypatch):
    monkeypatch.setattr(places, "_homes", {})
    monkeypatch.setattr(places, "_parent", lambda _: open_directory)
    make = "import sys; from pathlib import Path; from recipes.environments.swe.containers import places; "
    make += "print(places._make(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", make, str(open_directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        theirs = Path(other.stdout.readline().strip())
        own = places.home()
        assert theirs.is_dir()
        places.leave()
        other.kill()
        other.wait(timeout=60)
    assert theirs.is_dir()
    own = places.home()
    assert list(open_directory.iterdir()) == [own]
    places.leave()


def test_what_another_machine_has_in_a_shared_directory_is_kept(open_directory, monkeypatch):
    """No lock that is held there is seen here."""
    monkeypatch.setattr(places, "_homes", {})
    monkeypatch.setattr(places, "_parent", lambda _: open_directory)
    monkeypatch.setattr(places.socket, "gethostname", lambda: "node-7")
    theirs = places.home()
    places.leave()
    theirs.mkdir()
    monkeypatch.setattr(places.socket, "gethostname", lambda: "node-8")
    own = places.home()
    assert sorted(open_directory.iterdir()) == sorted([theirs, own])
    places.leave()
