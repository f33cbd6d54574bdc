"""What a checkpoint of production size costs the driver: seconds of a save and of a restart, without a model.

As many files as 512 ranks and an export of 49 files have, 1.96 TB, which are sparse: nothing is in them, and their sums
are wrong, so that one that is read is found damaged. State, waiting groups, ledger and what says which file holds which
tensor are as large as those of a step of 256 x 16 rollouts, and are written and read as in a run.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from recipes.files import FileSum
from recipes.grpo.checkpoint import LedgerEntry, SavedState, latest_checkpoint, load_state, prune
from recipes.grpo.data import CollectorState, DataIdentity
from recipes.grpo.saving import CheckpointWriter
from recipes.tokens import pack_rollouts
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan

NUM_RANKS, NUM_EXPORT_FILES = 512, 49
RANK_BYTES, EXPORT_BYTES = 3_350_000_000, 5_000_000_000  # of one file
INDEX_BYTES = 100_000_000  # of Megatron's .metadata: 41,643 tensors in many parts
NUM_GROUPS, NUM_ROLLOUTS, NUM_TOKENS, NUM_STEPS = 256, 16, 9_300, 200
LIMIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """Seconds of the driver's processor, and as they passed; the ranks' own work is not among them."""

    num_files: int
    num_bytes: int
    save_seconds: float
    save_elapsed: float
    restart_seconds: float
    restart_elapsed: float

    @property
    def is_kept(self) -> bool:
        """Whether neither costs more than the limit; how long they take depends on what else this machine does."""
        return max(self.save_seconds, self.restart_seconds) <= LIMIT_SECONDS

    def __str__(self) -> str:
        verdict = "within" if self.is_kept else "OVER"
        return (
            f"a checkpoint of {self.num_files} large files, {self.num_bytes / 1e12:.2f} TB, costs the driver"
            f" {self.save_seconds:.2f} s of CPU to save and {self.restart_seconds:.2f} s to restart from, {verdict} the"
            f" limit of {LIMIT_SECONDS:g} s; they took {self.save_elapsed:.2f} s and {self.restart_elapsed:.2f} s here"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the limit."""
        return {**asdict(self), "limit_seconds": LIMIT_SECONDS}


_Times = tuple[float, float]
"""Seconds of this process, all threads together, and of the clock."""


def _now() -> _Times:
    return time.process_time(), time.monotonic()


def _since(start: _Times) -> _Times:
    now = _now()
    return now[0] - start[0], now[1] - start[1]


@dataclass(slots=True)
class _SparsePolicy:
    """Has written files of the right sizes at once."""

    sums: dict[Path, FileSum] = field(default_factory=dict)
    times: _Times = (0.0, 0.0)  # of its own work

    def begin_save(self, path: Path, export_path: Path, *, with_optimizer: bool) -> None:
        start = _now()
        names = {path / f"__{rank}_0.distcp": RANK_BYTES for rank in range(NUM_RANKS)}
        parts = range(1, NUM_EXPORT_FILES + 1)
        names |= {export_path / f"model-{n:05d}-of-{NUM_EXPORT_FILES:05d}.safetensors": EXPORT_BYTES for n in parts}
        for directory in (path, export_path):
            directory.mkdir(parents=True)
        for file, size in names.items():
            file.touch()
            os.truncate(file, size)
        (path / ".metadata").write_bytes(os.urandom(INDEX_BYTES))
        self.sums = {file: FileSum("0" * 64, size) for file, size in names.items()}
        self.times = _since(start)

    def is_save_written(self) -> bool:
        return True

    def finish_save(self) -> tuple[float, dict[Path, FileSum]]:
        return 0.0, self.sums


def measure_save() -> SaveCost:
    """Save twice, so that the second prunes the first, and restart from the second."""
    policy = _SparsePolicy()
    with tempfile.TemporaryDirectory(prefix="bench-save-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        keep_one = partial(prune, root, keep_top_k=1, metric=None, higher_is_better=True, save_period=1)
        writer = CheckpointWriter(root, policy, prune=keep_one)
        for step in (NUM_STEPS - 1, NUM_STEPS):
            state = _state(step)
            start = _now()
            writer.begin(state)
            writer.wait()
            save = _since(start)
        start = _now()
        newest = latest_checkpoint(root)
        assert newest is not None and load_state(newest).step == NUM_STEPS, "the sparse files were read"
        restart = _since(start)
    sizes = [one.num_bytes or 0 for one in policy.sums.values()]
    return SaveCost(
        num_files=len(sizes),
        num_bytes=sum(sizes),
        save_seconds=save[0] - policy.times[0],
        save_elapsed=save[1] - policy.times[1],
        restart_seconds=restart[0],
        restart_elapsed=restart[1],
    )


def _state(step: int) -> SavedState:
    """Return the state of a run with one step of finished groups; their arrays are written as often as they stand."""
    turn = Turn(
        prompt_token_ids=(1,),
        token_ids=tuple(range(NUM_TOKENS)),
        logprobs=(-0.5,) * NUM_TOKENS,
        versions=(VersionSpan(version=step, start=0, end=NUM_TOKENS),),
        finish_reason="stop",
    )
    rollout = Rollout(turns=(turn,), status=RolloutStatus.COMPLETED, reason="right", reward=1.0)
    headers, tokens = pack_rollouts([rollout] * NUM_ROLLOUTS)
    prompts = [PromptRef(epoch=0, row_index=row, prompt_id="ab" * 8) for row in range(NUM_GROUPS)]
    finished = tuple(
        Group(prompt=one, agent="a", prompt_text="", target_step=step, version=step, rollouts=headers, tokens=None)
        for one in prompts
    )
    collector = CollectorState(
        position=NUM_GROUPS, in_flight=(), finished=finished, finished_tokens=(tokens,) * NUM_GROUPS, failed=()
    )
    return SavedState(
        step=step,
        data=DataIdentity(sha256="ef" * 32, num_rows=NUM_GROUPS, shuffle=False, seed=1),
        collector=collector,
        ledger=tuple(LedgerEntry(key=one.key, step=done) for done in range(1, step + 1) for one in prompts),
        metrics={"train/reward": 0.5},
    )
