"""Which checkpoints stay: the best by a metric, those on the save period, and the newest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.grpo.checkpoint import complete_checkpoints, prune
from recipes.grpo.saving import save_checkpoint
from tests.unit.grpo.checkpoint_case import Policy, run_state


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_top_k": 1, "keep_latest": 2}, [2, 6, 7]),
        ({"keep_top_k": 1, "higher_is_better": False}, [4, 7]),
        ({"keep_top_k": 1, "metric": None}, [6, 7]),
        ({"keep_top_k": None}, [2, 4, 6, 7]),
    ],
    ids=["two newest", "lower is better", "no metric", "all"],
)
def test_retention_follows_its_keys(tmp_path: Path, options: dict[str, Any], kept: list[int]) -> None:
    for step, loss in ((2, 0.9), (4, 0.1), (6, 0.5), (7, 0.0)):
        save_checkpoint(tmp_path, run_state(step, {"validation/loss": loss}), Policy())
    prune(tmp_path, **{"metric": "validation/loss", "higher_is_better": True, "save_period": 2, **options})
    assert list(complete_checkpoints(tmp_path)) == kept


def test_prune_keeps_the_best_and_the_newest(tmp_path: Path) -> None:
    for step, reward in ((2, 0.9), (4, 0.1), (6, 0.5), (7, 0.0)):
        save_checkpoint(tmp_path, run_state(step, {"validation/accuracy": reward}), Policy())
    prune(tmp_path, keep_top_k=2, metric="validation/accuracy", higher_is_better=True, save_period=2)
    assert list(complete_checkpoints(tmp_path)) == [2, 6, 7]
    assert not list(tmp_path.glob("tmp_*"))


def test_the_best_stays_when_a_resumed_run_has_another_save_period(tmp_path: Path) -> None:
    for step, period, reward in ((2, 2, 0.1), (4, 2, 0.9), (5, 2, 1.0), (6, 3, 0.5), (9, 3, 0.2)):
        state = replace(run_state(step, {"validation/accuracy": reward}), save_period=period)
        save_checkpoint(tmp_path, state, Policy())
    prune(tmp_path, keep_top_k=1, metric="validation/accuracy", higher_is_better=True, save_period=3)
    assert list(complete_checkpoints(tmp_path)) == [4, 9], "4 was on its period; 5 was not, and is not the newest"


def test_a_checkpoint_whose_metric_cannot_be_read_now_is_kept(tmp_path: Path) -> None:
    for step, reward in ((2, 0.9), (4, 0.1), (6, 0.5), (8, 0.0)):
        save_checkpoint(tmp_path, run_state(step, {"validation/accuracy": reward}), Policy())
    state, away = tmp_path / "step_000002" / "state.json", tmp_path / "away"
    state.rename(away)
    options: dict[str, Any] = {"metric": "validation/accuracy", "higher_is_better": True, "save_period": 2}
    prune(tmp_path, keep_top_k=1, **options)
    assert list(complete_checkpoints(tmp_path)) == [2, 6, 8], "the best was deleted"
    away.rename(state)
    prune(tmp_path, keep_top_k=1, **options)
    assert list(complete_checkpoints(tmp_path)) == [2, 8]


@pytest.mark.parametrize(("name", "is_told"), [("train/rewrad", True), ("train/reward", False)])
def test_a_metric_that_no_checkpoint_has_is_named_before_the_best_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_told: bool
) -> None:
    for step, reward in ((2, 0.9), (4, 0.1), (6, 0.5)):
        save_checkpoint(tmp_path, run_state(step, {"train/reward": reward}), Policy())
    prune(tmp_path, keep_top_k=1, metric=name, higher_is_better=True, save_period=2)
    assert ("no checkpoint has this metric" in caplog.text) == is_told


@pytest.mark.parametrize("validated_at", [None, 4])
def test_checkpoints_before_the_first_validation_lack_no_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, validated_at: int | None
) -> None:
    """As the published stage 2.2 does by itself: it saves every 2 steps and validates every 100."""
    for step in (2, 4, 6):
        measured = {"validation/other": 0.5} if step == validated_at else {}
        save_checkpoint(tmp_path, run_state(step, {"train/reward": 0.1, **measured}), Policy())
    prune(tmp_path, keep_top_k=1, metric="validation/accuracy", higher_is_better=True, save_period=2)
    assert ("no checkpoint has this metric" in caplog.text) == (validated_at is not None)
