"""Where a process keeps its containers' files: where the user of the containers can pass."""

from __future__ import annotations

import os
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
    monkeypatch.setattr(places, "container_user", lambda: os.geteuid() + 1)
    assert places._parent(private) == private
    private.parent.chmod(0o700)  # as that of a run
    assert places._parent(private) == Path("/tmp")
    monkeypatch.setattr(places, "container_user", os.geteuid)
    assert places._parent(private) == private
