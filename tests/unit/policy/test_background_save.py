"""The end of a save, for which training stands still, flushes what one rank has just written, and nothing else."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import PolicyError, RunError
from recipes.files import FileSum
from recipes.policy import saving
from recipes.policy.host_copies import HostCopies
from recipes.policy.worker import PolicyWorker


class Snapshot:
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self) -> dict[Path, FileSum]:
        for rank in range(3):
            (self._path / f"__{rank}_0.distcp").write_bytes(b"tensors")
        return {}

    def finish(self) -> None:
        for name in (".metadata", "metadata.json"):
            (self._path / name).write_bytes(b"where they lie")


@pytest.mark.parametrize(("rank", "flushed"), [(0, {".metadata", "metadata.json"}), (1, set())])
def test_only_the_rank_that_says_where_tensors_lie_flushes_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, flushed: set[str]
) -> None:
    synced: set[str] = set()
    trainer: Any = None
    monkeypatch.setattr(saving.checkpoint, "snapshot", lambda trainer, path, copies, with_optimizer: Snapshot(path))
    monkeypatch.setattr(saving.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(saving, "sync_files", lambda files: synced.update(file.name for file in files))
    save = saving.BackgroundSave(trainer, tmp_path, None, HostCopies(), with_optimizer=True)
    end = time.monotonic() + 30
    while not save.is_written() and time.monotonic() < end:
        time.sleep(0.01)
    save.finish()
    assert synced == flushed


def test_a_rank_that_could_not_write_is_no_failed_policy() -> None:
    class Failed:
        def is_written(self) -> bool:
            raise OSError(errno.EIO, "Input/output error")

    worker = PolicyWorker(3)
    worker._saving = Failed()  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"^policy rank 3 could not write .*Input/output error") as raised:
        worker.is_save_written()
    assert not isinstance(raised.value, PolicyError), "after which a run does not save"
