"""Saving while training goes on: the loop stands still for the copy into memory only.

    begin        training stands still    the policy's ranks copy their state, the driver notes where the run is
    writing      training goes on         each rank writes its copy, the driver everything else
    finish       between two steps        one rank writes what says which file holds which tensor
    completing   training goes on         flush, checksums, COMPLETE, rename, `latest`; then older ones are pruned

One save is in progress at a time. Until it is complete, the newest checkpoint is the one before, whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recipes.errors import StalledError
from recipes.grpo.checkpoint import EXPORT, SavedState, complete, discard, make_directory, step_dir, write_state

_POLL_SECONDS = 0.02


class Saveable(Protocol):
    """The part of `Policy` that a checkpoint uses."""

    def begin_save(self, path: Path, export_path: Path, *, with_optimizer: bool) -> None: ...

    def is_save_written(self) -> bool: ...

    def finish_save(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is complete."""

    path: Path
    step: int
    seconds: float  # that it would take if the loop did nothing else


@dataclass(slots=True, kw_only=True)
class _Save:
    step: int
    directory: Path  # temporary
    work: Future[float]  # of the driver; its seconds
    seconds: float  # so far
    is_finished: bool = False  # by the ranks


class CheckpointSaver:
    """Saves one checkpoint at a time. Its methods are called by the loop's thread, between steps."""

    def __init__(self, root: Path, policy: Saveable, *, prune: Callable[[], None] = lambda: None) -> None:
        """Save below `root`; `prune` is called after each checkpoint, in a thread."""
        self._root, self._policy, self._prune = root, policy, prune
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._save: _Save | None = None

    def begin(self, state: SavedState, *, with_optimizer: bool = True) -> None:
        """Take what a checkpoint holds into memory and begin to write it. None may be in progress."""
        assert self._save is None, "wait comes first"
        start, directory = time.monotonic(), make_directory(self._root, state.step)
        try:
            self._policy.begin_save(directory / "policy", directory / EXPORT, with_optimizer=with_optimizer)
        except Exception:
            discard(directory)
            raise
        work = self._pool.submit(_timed, write_state, directory, state)
        self._save = _Save(step=state.step, directory=directory, work=work, seconds=time.monotonic() - start)

    def advance(self) -> Saved | None:
        """Go on with the save in progress as far as is possible without waiting; returns it once it is complete.

        Raises what made it fail, once; it is given up then, and the checkpoint before stays the newest.
        """
        save = self._save
        if save is None:
            return None
        try:
            return self._advance(save)
        except Exception:
            self._save = None
            discard(save.directory)  # a full disk has room again for the logs that say so
            raise

    def wait(self, deadline_seconds: float = float("inf")) -> Saved | None:
        """Wait until the save in progress is complete; None when there is none. Raises as `advance` does.

        Raises `StalledError` and gives it up when it is not complete within the deadline.
        """
        end, save = time.monotonic() + deadline_seconds, self._save
        while save is not None:
            saved = self.advance()
            if saved is not None:
                return saved
            if time.monotonic() > end:
                self._save = None
                late = f"not written within {deadline_seconds:g} s (deadlines.checkpoint)"
                raise StalledError(f"checkpoint of step {save.step}: {late}")
            time.sleep(_POLL_SECONDS)
        return None

    def _advance(self, save: _Save) -> Saved | None:
        if not save.work.done():
            return None
        driver_seconds = save.work.result()
        if save.is_finished:
            self._save = None
            path = step_dir(self._root, save.step)
            return Saved(path=path, step=save.step, seconds=save.seconds + driver_seconds)
        if self._policy.is_save_written():
            save.seconds += max(driver_seconds, self._policy.finish_save())
            save.is_finished = True
            save.work = self._pool.submit(_timed, self._complete, save)
        return None

    def _complete(self, save: _Save) -> None:
        complete(self._root, save.step, save.directory)
        self._prune()


def _timed(call: Callable[..., None], *arguments: object) -> float:
    start = time.monotonic()
    call(*arguments)
    return time.monotonic() - start


def save_checkpoint(root: Path, state: SavedState, policy: Saveable) -> Path:
    """Write a checkpoint, point `latest` at it and return its directory."""
    saver = CheckpointSaver(root, policy)
    saver.begin(state)
    saved = saver.wait()
    assert saved is not None
    return saved.path
