"""Checkpoints: complete or absent, whatever happens; what is read back equals what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.errors import CheckpointError
from recipes.grpo.checkpoint import (
    LedgerEntry,
    SavedState,
    complete_checkpoints,
    complete_export,
    is_export,
    latest_checkpoint,
    load_state,
    prune,
    save_checkpoint,
)
from recipes.grpo.data import DataIdentity
from recipes.grpo.rollout import CollectorState, DrawnPrompt
from recipes.types import Group, PromptRef, Rollout, RolloutStatus, Turn, VersionSpan


class Policy:
    """Writes two small files, or dies after the first."""

    def __init__(self, *, dies: bool = False) -> None:
        self.dies = dies

    def save(self, path: Path) -> None:
        path.mkdir()
        (path / "weights").write_bytes(b"weights")

    def export_hf(self, path: Path) -> None:
        if self.dies:
            raise KeyboardInterrupt
        path.mkdir()
        (path / "config.json").write_text("{}")


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
        turns=(turn,), status=RolloutStatus.COMPLETED, reason="right", reward=1 / 3, metrics={"library_reward": 1.0}
    )
    return Group(
        prompt=PromptRef(epoch=1, row_index=row, prompt_id="ab" * 8),
        agent="mcqa_simple_agent",
        prompt_text="which?",
        target_step=5,
        version=4,
        rollouts=(good, failed),
    )


def drawn(position: int, target_step: int) -> DrawnPrompt:
    prompt = PromptRef(epoch=0, row_index=position, prompt_id="01" * 8)
    return DrawnPrompt(position=position, target_step=target_step, prompt=prompt)


def run_state(step: int, metrics: dict[str, float] | None = None) -> SavedState:
    return SavedState(
        step=step,
        data=DataIdentity(sha256="ef" * 32, num_rows=100, shuffle=False, seed=42),
        collector=CollectorState(
            position=12,
            in_flight=(drawn(9, 5), drawn(10, 6)),
            finished=(group(7), group(8)),
            failed=((PromptRef(epoch=0, row_index=3, prompt_id="cd" * 8), "env_failed: down"),),
            skipped=(14, 17),
        ),
        ledger=(LedgerEntry(key="0:1:ab", step=1), LedgerEntry(key="0:3:cd", step=0, reason="env_failed: down")),
        metrics=metrics or {},
    )


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(4, {"train/reward": 0.5}), Policy())
    assert load_state(path) == run_state(4, {"train/reward": 0.5})
    assert (tmp_path / "latest").resolve() == path == latest_checkpoint(tmp_path)
    assert (path / "hf" / "config.json").read_text() == "{}"


def test_a_kill_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, run_state(4), Policy())
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, run_state(5), Policy(dies=True))
    assert latest_checkpoint(tmp_path) == first
    (tmp_path / "tmp_pruned_step_000002").mkdir()
    second = save_checkpoint(tmp_path, run_state(6), Policy())  # what was left half-written or half-pruned goes
    assert latest_checkpoint(tmp_path) == second
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000004", "step_000006"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, run_state(4), Policy())
    path = save_checkpoint(tmp_path, run_state(4, {"train/reward": 1.0}), Policy())
    assert load_state(path).metrics == {"train/reward": 1.0}


def test_without_the_marker_it_does_not_count(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(4), Policy())
    (path / "COMPLETE").unlink()
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_damage_is_named_not_skipped(tmp_path: Path, damage: str) -> None:
    path = save_checkpoint(tmp_path, run_state(4), Policy())
    victim = path / "policy" / "weights"
    victim.write_bytes(b"weightz") if damage == "change" else victim.unlink()
    with pytest.raises(CheckpointError, match="policy/weights: got a file that is missing or differs"):
        latest_checkpoint(tmp_path)


def test_prune_keeps_the_best_and_the_newest(tmp_path: Path) -> None:
    for step, reward in ((2, 0.9), (4, 0.1), (6, 0.5), (7, 0.0)):
        save_checkpoint(tmp_path, run_state(step, {"validation/accuracy": reward}), Policy())
    prune(tmp_path, keep_top_k=2, metric="validation/accuracy", higher_is_better=True, save_period=2)
    assert list(complete_checkpoints(tmp_path)) == [2, 6, 7]
    assert not list(tmp_path.glob("tmp_*"))


def test_export_is_the_one_latest_points_at_now(tmp_path: Path) -> None:
    given = tmp_path / "latest" / "hf"
    with pytest.raises(CheckpointError, match="latest/hf: got no checkpoint"):
        complete_export(given)
    save_checkpoint(tmp_path, run_state(2), Policy())
    assert complete_export(given) == tmp_path / "step_000002" / "hf"
    save_checkpoint(tmp_path, run_state(4), Policy())
    assert complete_export(given) == tmp_path / "step_000004" / "hf"
    assert complete_export(tmp_path / "step_000002" / "hf") == tmp_path / "step_000002" / "hf"


def test_damaged_export_is_refused_but_not_for_the_policy_beside_it(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, run_state(2), Policy())
    (path / "policy" / "weights").write_bytes(b"Weights")  # the next stage does not read it
    assert complete_export(path / "hf") == path / "hf"
    (path / "hf" / "config.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"hf/config\.json: got a file that is missing or differs"):
        complete_export(path / "hf")
    (path / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="got a checkpoint that was not finished"):
        complete_export(path / "hf")


def test_only_paths_of_checkpoints_count_as_exports() -> None:
    assert is_export(Path("/results/r/checkpoints/latest/hf"))
    assert is_export(Path("step_000010/hf"))
    assert not is_export(Path("/models/sft/hf"))
    assert not is_export(Path("/results/r/checkpoints/latest/policy"))
