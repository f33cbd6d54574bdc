"""A hundred faults of the disk at random calls of a run that saves, and a ledger that is exact after each.

The power is cut: of every file only what was synced is left, of every directory either the names that were synced or
those that it had. Or the disk is full, or handles are stale, for a few calls: the run then ends or goes on.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from recipes.errors import RecipeError
from recipes.grpo import log, saving
from recipes.grpo.checkpoint import LedgerEntry, SavedState, latest_checkpoint, load_state, prune
from recipes.grpo.data import CollectorState, DataIdentity
from recipes.grpo.log import RunLogger
from recipes.grpo.metrics import StepMetrics
from recipes.grpo.saving import CheckpointWriter
from tests.unit.grpo.checkpoint_case import Policy
from tests.unit.grpo.test_log import LoggerCfg

FAULTS, SEED = 100, 7
STEPS, PROMPTS = 3, 2  # of each start, of each step
CALLS = 150  # about so many does a start make
FOREVER = 10**9


@dataclass(frozen=True)
class Entry:
    """What a directory says of one name."""

    inode: int
    is_directory: bool
    link: str | None  # where a symbolic link points


class Disk:
    """Counts the calls that change a directory, lets some of them fail, and remembers what a power cut would leave."""

    def __init__(self, root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch what happens below `root`. Synced files get a second name in `kept`: no inode is used twice."""
        self.root, self._kept = root, kept
        self.left, self.failing, self.number = FOREVER, 0, 0  # calls before the fault, calls that fail, errno
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, Entry]] = {}
        self._link, self._rmdir = os.link, os.rmdir
        for name in ("mkdir", "rename", "replace", "symlink", "unlink"):
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name)))
        monkeypatch.setattr(os, "rmdir", self._remove_directory)
        monkeypatch.setattr(os, "fsync", self._sync)
        opened = io.open
        guarded = self._guarded(opened)
        monkeypatch.setattr(io, "open", lambda *a, **o: (opened if _reads(*a, **o) else guarded)(*a, **o))

    def fail(self, *, after: int, calls: int, number: int) -> None:
        self.left, self.failing, self.number = after, calls, number

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0 and self.failing > 0:
            self.failing -= 1
            raise OSError(self.number, os.strerror(self.number))

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self._count()
            return call(*arguments, **options)

        return guarded

    def _remove_directory(self, path: str, *, dir_fd: int | None = None) -> None:
        self._count()
        number = os.stat(path, dir_fd=dir_fd).st_ino
        self._rmdir(path, dir_fd=dir_fd)
        self._names.pop(number, None)

    def _sync(self, descriptor: int) -> None:
        self._count()
        self.note(Path(f"/proc/self/fd/{descriptor}").readlink())

    def note(self, path: Path) -> None:
        """Remember a file or directory as it is."""
        number = path.stat().st_ino
        if path.is_dir():
            self._names[number] = _entries(path)
            return
        self._contents[number] = path.read_bytes()
        with suppress(FileExistsError):
            self._link(path, self._kept / str(number))

    def cut_power(self, target: Path, *, has_names: bool) -> None:
        """Write to `target` what the disk holds, and go on there; with `has_names` names are kept as they are."""
        self.left, self.failing = FOREVER, 0
        self._restore(self.root.stat().st_ino, self.root if has_names else None, target)
        self.root = target

    def _restore(self, number: int, source: Path | None, target: Path) -> None:
        target.mkdir()
        entries = _entries(source) if source is not None else self._names.get(number, {})
        for name, entry in entries.items():
            path = target / name
            if entry.link is not None:
                path.symlink_to(entry.link)
            elif entry.is_directory:
                self._restore(entry.inode, source / name if source is not None else None, path)
            else:
                path.write_bytes(self._contents.get(entry.inode, b""))
                self.note(path)
        self.note(target)


def _entries(directory: Path) -> dict[str, Entry]:
    return {
        path.name: Entry(
            inode=path.lstat().st_ino,
            is_directory=path.is_dir() and not path.is_symlink(),
            link=str(path.readlink()) if path.is_symlink() else None,
        )
        for path in directory.iterdir()
    }


def _reads(*arguments: Any, **options: Any) -> bool:
    mode = options.get("mode", arguments[1] if len(arguments) > 1 else "r")
    return not set(mode) & set("wax+")


def train(root: Path) -> int:
    """Resume, train and save some steps; return the last step that was said to be saved."""
    checkpoints = root / "checkpoints"
    newest = latest_checkpoint(checkpoints)
    saved = load_state(newest) if newest is not None else None
    done, ledger = (saved.step, list(saved.ledger)) if saved is not None else (0, [])
    log = RunLogger(root, LoggerCfg(), num_steps=FOREVER)
    retention = {"keep_top_k": 2, "metric": None, "higher_is_better": True, "save_period": 1}
    writer = CheckpointWriter(checkpoints, Policy(), prune=partial(prune, checkpoints, **retention))
    said = done
    try:
        log.resume(done)
        for step in range(done + 1, done + STEPS + 1):
            ledger += [LedgerEntry(key=f"0:{(step - 1) * PROMPTS + n}:ab", step=step) for n in range(PROMPTS)]
            metrics = StepMetrics(step)
            metrics.add({"reward": 0.5})
            log.log(metrics)
            log.flush()
            writer.begin(state_of(step, ledger))
            if writer.wait() is not None:
                said = step
    except (OSError, RecipeError):
        pass  # the run has failed, and is started again
    finally:
        with suppress(RecipeError):
            log.close()
    return said


def state_of(step: int, ledger: list[LedgerEntry]) -> SavedState:
    return SavedState(
        step=step,
        data=DataIdentity(sha256="ef" * 32, num_rows=FOREVER, shuffle=False, seed=42),
        collector=CollectorState(position=step * PROMPTS, in_flight=(), finished=(), failed=()),
        ledger=tuple(ledger),
        metrics={},
    )


def check(root: Path, said: int) -> int:
    """Require the ledger and the log of the newest checkpoint, which is at least `said`; return its step."""
    newest = latest_checkpoint(root / "checkpoints")
    if newest is None:
        assert said == 0, f"step {said} was saved, and there is no checkpoint"
        return 0
    state = load_state(newest)
    assert state.step >= said, f"step {said} was saved, and {state.step} is the newest"
    assert [entry.key for entry in state.ledger] == [f"0:{row}:ab" for row in range(state.step * PROMPTS)]
    lines = (root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[: state.step]
    assert [json.loads(line)["step"] for line in lines] == list(range(1, state.step + 1))
    return state.step


def test_no_fault_of_the_disk_loses_or_repeats_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (log, saving):
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.001)
    rng, names = Random(SEED), (tmp_path / str(number) for number in itertools.count())
    root, kept = next(names), tmp_path / "kept"
    for path in (kept, root, root / "checkpoints"):
        path.mkdir()
    disk, said = Disk(root, kept, monkeypatch), 0
    for path in (root / "checkpoints", root):
        disk.note(path)
    for _ in range(FAULTS):
        kind = rng.choice(["power", errno.ENOSPC, errno.ESTALE])
        after = rng.randrange(CALLS)
        if kind == "power":
            disk.fail(after=after, calls=FOREVER, number=errno.EIO)
        else:
            disk.fail(after=after, calls=rng.randint(1, 5), number=kind)
        said = train(disk.root)
        disk.failing = 0
        if kind == "power":
            disk.cut_power(next(names), has_names=rng.random() < 0.5)
        said = check(disk.root, said)
    assert said > FAULTS
