"""A state of a run and a policy to be saved, for the tests of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipes.files import FileSum, SummedFile
from recipes.grpo.checkpoint import LedgerEntry, SavedState
from recipes.grpo.data import CollectorState, DataIdentity, DrawnPrompt
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan
from tests.groups import group_of

SHARE = "__0_0.distcp"  # the file of the one rank


class Policy:
    """Writes two small files and that of a rank, or dies after the first."""

    def __init__(self, *, dies: bool = False) -> None:
        self.dies = dies
        self.sums: dict[Path, FileSum] = {}

    def begin_save(self, path: Path, export_path: Path, *, with_optimizer: bool) -> None:
        path.mkdir()
        (path / "weights").write_bytes(b"weights")
        with SummedFile(path / SHARE) as file:
            file.write(b"tensors")
        self.sums = {path / SHARE: file.sum()}
        if self.dies:
            raise KeyboardInterrupt
        export_path.mkdir()
        (export_path / "config.json").write_text("{}", encoding="utf-8")

    def is_save_written(self) -> bool:
        return True

    def finish_save(self) -> tuple[float, dict[Path, FileSum]]:
        return 0.5, self.sums


def group(row: int) -> Group:
    turn = Turn(
        prompt_token_ids=(1, 2),
        token_ids=(3, 4),
        logprobs=(-0.1, -1.2345678901234567e-05),
        versions=(VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)),
        finish_reason="stop",
        has_malformed_thinking=True,
    )
    failed = Rollout(turns=(), status=RolloutStatus.TIMED_OUT, reason="late", reward=None)
    good = Rollout(
        turns=(turn,),
        status=RolloutStatus.COMPLETED,
        reason="right",
        reward=1 / 3,
        metrics={"library_reward": 1.0},
        output_text="\u2028 \ud800",
    )
    return group_of(
        (good, failed),
        prompt=PromptRef(epoch=1, row_index=row, prompt_id="ab" * 8),
        agent="mcqa_simple_agent",
        prompt_text="which? \ud800",  # half a surrogate pair, as JSON may hold
        target_step=5,
        version=4,
    )


def drawn(position: int, target_step: int) -> DrawnPrompt:
    prompt = PromptRef(epoch=0, row_index=position, prompt_id="01" * 8)
    return DrawnPrompt(position=position, target_step=target_step, prompt=prompt)


def run_state(step: int, metrics: dict[str, float] | None = None) -> SavedState:
    finished = (group(7), group(8))
    return SavedState(
        step=step,
        data=DataIdentity(sha256="ef" * 32, num_rows=100, shuffle=False, seed=42),
        collector=CollectorState(
            position=12,
            in_flight=(drawn(9, 5), drawn(10, 6)),
            finished=tuple(replace(one, tokens=None) for one in finished),
            finished_tokens=tuple(one.tokens for one in finished),
            failed=((PromptRef(epoch=0, row_index=3, prompt_id="cd" * 8), "env_failed: down"),),
            skipped=(14, 17),
            set_aside=(6, 11),
        ),
        ledger=(LedgerEntry(key="0:1:ab", step=1), LedgerEntry(key="0:3:cd", step=0, reason="env_failed: down")),
        metrics=metrics or {},
        step_seconds=1.25,
        save_seconds=2.5,
    )
