"""Saving while training goes on: the loop stands still for the copy into memory only.

    begin        training stands still    the policy's ranks copy their state, the driver notes where the run is
    writing      training goes on         each rank writes its copy and sums it, the driver everything else
    finish       between two steps        one rank writes what says which file holds which tensor
    completing   training goes on         flush, small files' sums, COMPLETE, rename, `latest`; older ones are pruned

One save is in progress at a time. Until it is complete, the newest checkpoint is the one before, whatever happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from recipes.config.tree import Config
from recipes.errors import StalledError
from recipes.files import FileSum
from recipes.grpo.checkpoint import (
    EXPORT,
    LedgerEntry,
    SavedState,
    TrainState,
    complete,
    content_digest,
    discard,
    make_directory,
    prune,
    step_dir,
    write_state,
)
from recipes.grpo.data import DataIdentity
from recipes.grpo.log import Recorder
from recipes.grpo.metrics import metric_key
from recipes.grpo.rollout import RolloutCollector
from recipes.stop import StopRequest

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class Saveable(Protocol):
    """The part of `Policy` that a checkpoint uses."""

    def begin_save(self, path: Path, export_path: Path, *, with_optimizer: bool) -> None: ...

    def is_save_written(self) -> bool: ...

    def finish_save(self) -> tuple[float, dict[Path, FileSum]]: ...


class Forecaster(Saveable, Protocol):
    """The part of `Policy` that a run's checkpoints use: one that also says how long a save will take."""

    def expected_save_seconds(self, directory: Path, *, with_optimizer: bool) -> float: ...


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
    sums: dict[Path, FileSum] = field(default_factory=dict)  # of what the ranks have written
    is_finished: bool = False  # by the ranks


class CheckpointWriter:
    """Writes one checkpoint at a time. Its methods are called by the loop's thread, between steps."""

    def __init__(self, root: Path, policy: Saveable, *, prune: Callable[[], None] = lambda: None) -> None:
        """Write below `root`; `prune` is called after each checkpoint, in a thread."""
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
            rank_seconds, save.sums = self._policy.finish_save()
            save.seconds += max(driver_seconds, rank_seconds)
            save.is_finished = True
            save.work = self._pool.submit(_timed, self._complete, save)
        return None

    def _complete(self, save: _Save) -> None:
        complete(self._root, save.step, save.directory, save.sums)
        self._prune()


def _timed(call: Callable[..., None], *arguments: object) -> float:
    start = time.monotonic()
    call(*arguments)
    return time.monotonic() - start


def save_checkpoint(root: Path, state: SavedState, policy: Saveable) -> Path:
    """Write a checkpoint, point `latest` at it and return its directory."""
    saver = CheckpointWriter(root, policy)
    saver.begin(state)
    saved = saver.wait()
    assert saved is not None
    return saved.path


@dataclass(slots=True, kw_only=True)
class Saver:
    """When the checkpoints of a run are written, and of what; how many are kept."""

    config: Config
    root: Path  # directory of the checkpoints
    policy: Forecaster
    collector: RolloutCollector
    recorder: Recorder
    state: TrainState
    data: DataIdentity  # of the training rows
    stop: StopRequest  # keeps free the time that a save takes
    _writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        self._writer = CheckpointWriter(self.root, self.policy, prune=self._prune)
        self.stop.save_seconds = self.state.save_seconds or self._expected_seconds()

    def _expected_seconds(self) -> float:
        """Return how long the first save of a run will take, so that there is time for it at the end of the job."""
        cfg = self.config.checkpointing
        if not cfg.enabled:
            return 0.0
        place = self.root / "tmp_speed"  # what a kill leaves of it goes with the next save
        place.mkdir(parents=True, exist_ok=True)
        try:
            seconds = self.policy.expected_save_seconds(place, with_optimizer=cfg.save_optimizer)
        finally:
            discard(place)
        logger.info("the first save is expected to take %.1f s; twice as long is kept free for it", seconds)
        return seconds

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint of the step just done was asked for."""
        cfg = self.config.checkpointing
        return cfg.enabled and cfg.save_period > 0 and self.state.step % cfg.save_period == 0

    @property
    def lacks_step(self) -> bool:
        """Whether the step just done is in no checkpoint, and should be in one."""
        return self.config.checkpointing.enabled and self.state.step > self.state.saved_step

    def begin(self) -> None:
        """Begin a checkpoint of everything up to the step just recorded, once the one before is complete."""
        start, seconds = time.monotonic(), self.config.deadlines.checkpoint
        with self.recorder.metrics.timed("checkpointing"):  # for the heartbeat: this step's record is already written
            self.recorder.logger.flush(seconds)  # so that metrics.jsonl has every step of a complete checkpoint
            self.wait()
            try:
                state = self._state()
            except StalledError as error:
                logger.error("step %d not saved, the next save tries again: %s", self.state.step, error)
                return
            self._writer.begin(state, with_optimizer=self.config.checkpointing.save_optimizer)
        self.recorder.save_seconds = time.monotonic() - start

    def advance(self) -> None:
        """Go on with the save in progress as far as is possible without waiting; raises what made it fail."""
        self._mark_saved(self._writer.advance())

    def wait(self) -> None:
        """Wait until the save in progress is complete, if there is one."""
        self._mark_saved(self._writer.wait(self.config.deadlines.checkpoint))

    def save_rest(self) -> None:
        """Save what no checkpoint has yet; when this returns, the newest one is complete."""
        self.wait()
        if self.lacks_step:
            self.begin()
            self.wait()

    def _state(self) -> SavedState:
        collector = self.collector.state()
        failed = [LedgerEntry(key=ref.key, step=0, reason=reason) for ref, reason in collector.failed]
        return SavedState(
            step=self.state.step,
            data=self.data,
            collector=collector,
            ledger=(*self.state.ledger, *failed),
            metrics=self.state.metrics,
            step_seconds=self.state.step_seconds,
            save_seconds=self.state.save_seconds,
            save_period=self.config.checkpointing.save_period,
        )

    def _mark_saved(self, saved: Saved | None) -> None:
        """Take in that a checkpoint is complete now."""
        if saved is not None:
            self.state.saved_step = saved.step
            self.stop.save_seconds = self.state.save_seconds = max(self.state.save_seconds, saved.seconds)
            logger.info("saved %s, content %s", saved.path, content_digest(saved.path)[:16])

    def _prune(self) -> None:
        cfg = self.config.checkpointing
        prune(
            self.root,
            keep_top_k=cfg.keep_top_k,
            metric=metric_key(cfg.metric_name),
            higher_is_better=cfg.higher_is_better,
            save_period=cfg.save_period,
            keep_latest=cfg.ft_keep_latest_k,
        )
