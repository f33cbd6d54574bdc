"""How a run ends: its data, a stop in the last step, a validation that is good enough. The loop runs on fakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.errors import RunError
from recipes.grpo.checkpoint import complete_checkpoints
from recipes.types import ModelClient, Rollout, Row, TrainBatch
from tests.unit.grpo.loop_case import LoopEnvironments, drive, make_run, policy_step, records

ROWS = [str(number) for number in range(12)]
AT_END = ("grpo.val_at_end=true", "grpo.val_num_generations_per_prompt=1", "grpo.val_greedy=false")


def test_data_that_ends_early_is_validated_and_saved_like_the_end(tmp_path: Path) -> None:
    environments = LoopEnvironments(broken=["3", "8", "9"])
    run = make_run(tmp_path, ROWS, *AT_END, environments=environments)
    assert run.num_steps == 6
    run.config = replace(run.config, grpo=replace(run.config.grpo, max_num_steps=9))
    assert drive(run) is None
    assert run.shortfall == "4 of the 9 steps asked for: the data ended, 3 prompts env_failed: down"
    assert run.is_complete
    assert (run.state.step, run.num_steps) == (4, 4), "nine prompts are four steps of two"
    lines = records(tmp_path)
    assert [record["step"] for record in lines] == [1, 2, 3, 4]
    assert ["validation/accuracy" in record for record in lines] == [False, False, False, True]
    assert "train/reward" in lines[-1], "the record of the last step was lost"
    assert list(complete_checkpoints(tmp_path / "checkpoints")) == [4]


def test_data_that_ends_before_the_first_step_is_a_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path, ["0", "1", "2"], environments=LoopEnvironments(broken=["0", "2"]))
    failure = drive(run)
    assert isinstance(failure, RunError), "a stage that hands nothing over must not count as done"
    assert str(failure) == "the data ended before the first step was trained: 2 prompts env_failed: down"


def test_a_stop_in_the_last_step_leaves_the_validation_to_the_next_start(tmp_path: Path) -> None:
    run = make_run(tmp_path, ROWS, *AT_END)

    train_step = run.policy.train

    def stop_in_the_last(batch: TrainBatch) -> dict[str, float]:
        if run.state.step == 5:
            run.stop.reason = "signal SIGTERM"
        return train_step(batch)

    run.policy.train = stop_in_the_last  # type: ignore[method-assign]
    assert drive(run) is None
    assert not run.is_complete, "the launcher must start it again"
    assert list(complete_checkpoints(tmp_path / "checkpoints")) == [6]

    again = make_run(tmp_path, ROWS, *AT_END)
    assert drive(again) is None
    assert again.is_complete
    lines = records(tmp_path)
    assert [record["step"] for record in lines] == [1, 2, 3, 4, 5, 6]
    assert "validation/accuracy" in lines[-1]
    assert "train/reward" in lines[-1]


def test_a_stop_in_the_last_step_is_the_end_when_nothing_is_left_to_do(tmp_path: Path) -> None:
    run = make_run(tmp_path, ROWS[:2])
    run.state.step_seconds = 1.0
    assert drive(run) is None
    run.stop.reason = "signal SIGTERM"
    assert run.is_complete


class Learning(LoopEnvironments):
    """Validation earns 0.25 more each time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_held_out = 0

    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
        rollout = await super().run(row, model, max_tokens=max_tokens)
        if row["agent_ref"]["name"] != "held":
            return rollout
        self.num_held_out += 1
        return replace(rollout, reward=0.25 * (self.num_held_out - 1))


def test_a_run_ends_complete_once_its_validation_is_good_enough(tmp_path: Path) -> None:
    options = (
        "grpo.val_period=1",
        "grpo.val_at_start=true",
        "grpo.val_greedy=false",
        "grpo.val_num_generations_per_prompt=1",
        "grpo.stop_at_validation_metric=held/accuracy",
        "grpo.stop_at_validation_threshold=0.5",
    )
    run = make_run(tmp_path, ROWS, *options, environments=Learning())
    assert drive(run) is None
    assert run.is_complete
    assert policy_step(tmp_path) == run.state.step == 2  # 0 at the start, 0.25 after one step, 0.5 after two
    assert records(tmp_path)[-1]["validation/held/accuracy"] == 0.5
    again = make_run(tmp_path, ROWS, *options, environments=Learning())
    assert again.is_complete, "a job that was queued behind it must not train on"
    again.close()


def test_a_metric_that_was_not_measured_ends_nothing_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = (
        "grpo.val_period=1",
        "grpo.stop_at_validation_metric=helt/accuracy",
        "grpo.stop_at_validation_threshold=0",
    )
    run = make_run(tmp_path, ROWS, *options)
    assert drive(run) is None
    assert run.state.step == 6
    assert "helt/accuracy was not measured; there is accuracy, avg_length" in caplog.text
