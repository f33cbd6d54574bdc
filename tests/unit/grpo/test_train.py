"""The loop as a whole, on fakes: what a failure costs, what a resume does, what a limit of time ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from recipes.config.tree import Config
from recipes.errors import EngineError, PolicyError, RunError, StalledError
from recipes.grpo.checkpoint import complete_checkpoints, latest_checkpoint, load_state
from recipes.grpo.reward import collect_rewards
from recipes.stop import StopRequest
from recipes.types import Group, ModelClient, Rollout, Row
from tests.unit.grpo.loop_case import LoopEnvironments, LoopPolicy, drive, make_run, policy_step, records, trained

ROWS = [str(number) for number in range(12)]


FAILURES = {
    "an engine dies while it samples": ("generation.generate 12", EngineError("engine 0 died")),
    "a push of weights fails": ("generation.update_weights 4", EngineError("engine 0 died")),
    "the wait stalls": ("generation.generate 12", StalledError("nothing came")),
    "a bug in the loop": ("generation.stats 3", ValueError("bug")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_beside_the_policy_loses_no_step_and_no_prompt(tmp_path: Path, name: str) -> None:
    where, failure = FAILURES[name]
    run = make_run(tmp_path, ROWS, failures={where: failure})
    assert drive(run) is failure
    done = run.state.step
    assert done > 0
    assert list(complete_checkpoints(tmp_path / "checkpoints")) == [done]
    assert policy_step(tmp_path) == done
    assert [record["step"] for record in records(tmp_path)] == list(range(1, done + 1))

    assert drive(make_run(tmp_path, ROWS)) is None
    assert policy_step(tmp_path) == 6
    assert sorted(trained(tmp_path)) == list(range(12)), "a prompt was trained twice or never"
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 7))


def test_groups_taken_and_not_trained_are_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(6))

    def fail_in_the_third(groups: Sequence[Group], config: Config) -> tuple[Tensor, dict[str, float]]:
        if next(steps) == 2:
            raise ValueError("bug")
        return collect_rewards(groups, config)

    with monkeypatch.context() as patch:
        patch.setattr("recipes.grpo.train.collect_rewards", fail_in_the_third)
        assert isinstance(drive(make_run(tmp_path, ROWS)), ValueError)
    assert policy_step(tmp_path) == 2
    assert drive(make_run(tmp_path, ROWS)) is None
    assert sorted(trained(tmp_path)) == list(range(12))


def test_a_failed_policy_is_not_saved(tmp_path: Path) -> None:
    failure = PolicyError("rank 3 died")
    assert drive(make_run(tmp_path, ROWS, failures={"policy.train 3": failure})) is failure
    assert complete_checkpoints(tmp_path / "checkpoints") == {}


def test_a_policy_that_stopped_half_way_is_not_saved(tmp_path: Path) -> None:
    failure = ValueError("of whatever kind")
    assert drive(make_run(tmp_path, ROWS, failures={"policy.train 3": failure})) is failure
    assert complete_checkpoints(tmp_path / "checkpoints") == {}


def test_engine_statistics_that_fail_never_end_a_run(tmp_path: Path) -> None:
    assert drive(make_run(tmp_path, ROWS, failures={"generation.stats 2": EngineError("no answer")})) is None
    assert [("idle/generation" in record) for record in records(tmp_path)] == [True, False, True, True, True, True]
    assert all("idle/policy" in record for record in records(tmp_path))


def test_a_collector_that_cannot_be_asked_costs_one_save_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, ROWS, "checkpointing.save_period=2", "checkpointing.keep_top_k=null")
    state = run.collector.state

    def once() -> object:
        monkeypatch.setattr(run.collector, "state", state)
        raise StalledError("stuck")

    monkeypatch.setattr(run.collector, "state", once)
    assert drive(run) is None
    assert list(complete_checkpoints(tmp_path / "checkpoints")) == [4, 6]


def test_a_save_waits_for_the_log_as_long_as_for_the_checkpoint_itself(tmp_path: Path) -> None:
    """A shared file system may stand still for minutes: that must not end a run which its checkpoint would survive."""
    run = make_run(tmp_path, ROWS, "checkpointing.save_period=3", "deadlines.checkpoint=77", "deadlines.shutdown=88")
    flush, close, waits = run.recorder.logger.flush, run.recorder.logger.close, list[float]()
    run.recorder.logger.flush = lambda *seconds: (waits.extend(seconds), flush(*seconds))[1]  # type: ignore[method-assign]
    run.recorder.logger.close = lambda *seconds: (waits.extend(seconds), close(*seconds))[1]  # type: ignore[method-assign]
    assert drive(run) is None
    assert waits == [77, 77, 88]


def test_the_snapshot_does_not_need_the_collectors_thread(tmp_path: Path) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    class Blocking(LoopEnvironments):
        async def run(self, *args: object, **options: object) -> object:  # type: ignore[override]
            stuck.set()
            go_on.wait(60)  # as a verifier that never gives control back
            return await super().run(*args, **options)  # type: ignore[arg-type]

    run = make_run(tmp_path, ROWS, environments=Blocking())
    run.collector.start(version=0, last_step=6)
    assert stuck.wait(30)
    start = time.monotonic()
    state = run.collector.state()
    assert time.monotonic() - start < 30  # the thread is stuck for 60
    assert len(state.in_flight) == state.position > 0
    go_on.set()
    run.close()


def test_a_resumed_job_begins_no_step_that_it_cannot_finish(tmp_path: Path) -> None:
    first = make_run(tmp_path, ROWS, "grpo.max_num_steps=2")
    first.state.step_seconds = 1000.0
    assert drive(first) is None
    now = time.time()
    stop = StopRequest(must_save_by=None, job_start=now, job_end=now + 600)  # a step takes longer
    run = make_run(tmp_path, ROWS, stop=stop)
    assert run.state.step_seconds == first.state.step_seconds
    assert run.state.step_seconds > 600
    assert drive(run) is None
    assert run.stop.reason == "the job's time limit"
    assert run.state.step == 2
    assert not run.is_complete


def test_a_resumed_job_leaves_the_time_that_saves_took_before(tmp_path: Path) -> None:
    first = make_run(tmp_path, ROWS, "grpo.max_num_steps=4", "checkpointing.save_period=2")
    first.policy.finish_save = lambda: (900.0, {})  # type: ignore[method-assign]
    assert drive(first) is None
    again = make_run(tmp_path, ROWS)
    assert again.stop.save_seconds >= 900.0, "the save of a job that is cut short would end after the job"
    again.close()


def test_a_job_leaves_the_time_that_its_first_save_is_expected_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopPolicy, "expected", 700.0)  # of a model whose first save is the one at the time limit
    now = time.time()
    stop = StopRequest(must_save_by=None, job_start=now - 13_000, job_end=now + 1_300)
    run = make_run(tmp_path, ROWS, stop=stop)
    assert not list((tmp_path / "checkpoints").glob("*")), "the try leaves something behind"
    assert drive(run) is None
    assert run.stop.reason == "the job's time limit" and run.state.step == 0
    first = make_run(tmp_path, ROWS, "grpo.max_num_steps=4", "checkpointing.save_period=2")
    assert first.stop.save_seconds == 700.0
    assert drive(first) is None
    again = make_run(tmp_path, ROWS)
    assert 0 < again.stop.save_seconds < 700.0, "a save was measured: that counts"
    again.close()


def test_a_time_limit_ends_the_wait_for_rollouts_and_the_run_saves(tmp_path: Path) -> None:
    class Late(LoopEnvironments):
        async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
            if int(row["responses_create_params"]["input"]) >= 4:
                await asyncio.sleep(3600)
            return await super().run(row, model, max_tokens=max_tokens)

    asked = list[int]()
    # The limit passes while the third step waits for its groups.
    stop = StopRequest(must_save_by="00:00:10:00", job_start=0.0, clock=lambda: 700.0 if 2 in asked else 0.0)
    run = make_run(tmp_path, ROWS, environments=Late(), stop=stop)
    take = run.buffer.take

    def note(step: int, **options: Any) -> list[Group]:
        asked.append(step)
        return take(step, **{**options, "deadline_seconds": 10.0})

    run.buffer.take = note  # type: ignore[method-assign]
    assert drive(run) is None
    assert run.stop.reason == "checkpointing.checkpoint_must_save_by"
    assert not run.is_complete
    assert list(complete_checkpoints(tmp_path / "checkpoints")) == [2]


def test_many_masked_sequences_in_a_row_raise_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path, [str(number) for number in range(20)])
    masked = iter([1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0])  # of four sequences
    train_step = run.policy.train
    run.policy.train = lambda batch: {  # type: ignore[method-assign]
        **train_step(batch),
        "num_masked_seqs_by_logprob_error": next(masked),
    }
    assert drive(run) is None
    counts = [record["train/mismatch_alarm_steps"] for record in records(tmp_path)]
    assert counts == [1, 0, 1, 2, 3, 4, 5, 6, 0, 1]
    alarms = [entry.message for entry in caplog.records if "are masked because" in entry.message]
    assert [alarm.split(":")[0] for alarm in alarms] == ["step 7", "step 8"]
    assert "25% of the sequences" in alarms[0]


def test_every_progress_line_says_when_engines_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run = make_run(tmp_path, ROWS)
    run.generation.num_engines, run.generation.num_engines_alive = 2, 1  # type: ignore[misc]
    assert drive(run) is None
    lines = [entry.message for entry in caplog.records if "/6 | reward" in entry.message]
    assert len(lines) == 6
    assert all("engines 1 of 2" in line for line in lines)


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_stop_ends_a_validation_and_saves_the_step(tmp_path: Path, by_signal: bool) -> None:
    class Slow(LoopEnvironments):
        """The held-out row takes longer than the test may."""

        was_cancelled = False

        async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
            if row["agent_ref"]["name"] != "held":
                return await super().run(row, model, max_tokens=max_tokens)
            if by_signal:
                run.stop.reason = "signal SIGTERM"  # as the handler does
            else:
                run.stop = run.saver.stop = StopRequest(must_save_by="00:00:00:00", job_start=time.time())
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
            raise AssertionError("nobody cancelled it")

    environments = Slow()
    run = make_run(tmp_path, ROWS, "grpo.val_period=2", environments=environments)
    start = time.monotonic()
    assert drive(run) is None
    assert time.monotonic() - start < 60
    assert environments.was_cancelled
    assert not run.is_complete
    assert policy_step(tmp_path) == 2
    lines = records(tmp_path)
    assert [record["step"] for record in lines] == [1, 2]
    assert not [name for name in lines[-1] if name.startswith("validation/")]
    assert drive(make_run(tmp_path, ROWS)) is None
    assert sorted(trained(tmp_path)) == list(range(12))


@pytest.mark.parametrize("multiplier", [1, 2])
def test_dynamic_sampling_leaves_no_group_without_variance_in_a_batch(tmp_path: Path, multiplier: int) -> None:
    class Solved(LoopEnvironments):
        """Of every third prompt both answers are right, of the others one."""

        def __init__(self) -> None:
            super().__init__()
            self.answers: Counter[str] = Counter()

        async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
            rollout = await super().run(row, model, max_tokens=max_tokens)
            text = row["responses_create_params"]["input"]
            self.answers[text] += 1
            return replace(rollout, reward=1.0 if int(text) % 3 == 0 else float(self.answers[text] % 2))

    rows = [str(number) for number in range(18)]
    overrides = ("grpo.use_dynamic_sampling=true", f"grpo.batch_multiplier={multiplier}")
    run = make_run(tmp_path, rows, *overrides, environments=Solved())
    assert drive(run) is None
    # The last two groups may belong to two steps, neither of which the data can fill, unless steps share their groups.
    assert len(trained(tmp_path)) == len(set(trained(tmp_path))) in ((10, 12) if multiplier == 1 else (12,))
    assert not {row for row in trained(tmp_path) if row % 3 == 0}
    assert all(record["train/num_groups_zero_variance"] == 0 for record in records(tmp_path))
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    lost = [entry for entry in load_state(found).ledger if not entry.step]
    assert {int(entry.key.split(":")[1]) for entry in lost} == {0, 3, 6, 9, 12, 15}
    assert {entry.reason.partition(":")[0] for entry in lost} == {"no_variance"}


def test_steps_without_finite_gradients_in_a_row_end_the_run_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path, ROWS, "policy.max_skipped_steps=1")
    skipped, train_step = iter([1.0, 0.0, 1.0, 1.0]), run.policy.train
    run.policy.train = lambda batch: {**train_step(batch), "skipped_steps": next(skipped)}  # type: ignore[method-assign]
    failure = drive(run)
    assert isinstance(failure, RunError)
    assert "in each of the last 2 steps, more than policy.max_skipped_steps = 1" in str(failure)
    assert policy_step(tmp_path) == 4
    assert [record["train/skipped_steps"] for record in records(tmp_path)] == [1.0, 0.0, 1.0, 1.0]


def test_a_run_goes_on_while_one_optimizer_step_of_each_batch_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    halves = ["policy.train_global_batch_size=2", "loss_fn.force_on_policy_ratio=false"]
    run = make_run(tmp_path, ROWS, "policy.max_skipped_steps=1", *halves)
    train_step = run.policy.train
    run.policy.train = lambda batch: {**train_step(batch), "skipped_steps": 1.0}  # type: ignore[method-assign]
    assert drive(run) is None
    assert "step 1: loss or gradients are not finite in 1 of 2 optimizer steps" in caplog.text


@pytest.mark.parametrize(
    ("override", "oldest"), [("enabled=false", {0}), ("max_trajectory_age_steps=0", {0}), ("enabled=true", {0, 1})]
)
def test_only_asynchronous_training_takes_what_older_weights_sampled(
    tmp_path: Path, override: str, oldest: set[int]
) -> None:
    assert drive(make_run(tmp_path, ROWS, f"grpo.async_grpo.{override}")) is None
    assert {record["train/max_trajectory_age"] for record in records(tmp_path)} == oldest
