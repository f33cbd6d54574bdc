"""A save goes on while training does; it is complete or given up, and its failure is raised once."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path

import pytest

from recipes.errors import EngineError, PolicyError, RunError, StalledError
from recipes.grpo import saving
from recipes.grpo.checkpoint import complete_checkpoints, latest_checkpoint, load_state
from recipes.grpo.run import Run
from recipes.grpo.saving import CheckpointWriter, save_checkpoint
from tests.unit.grpo.checkpoint_case import Policy, run_state
from tests.unit.grpo.loop_case import drive, make_run, policy_step, records, trained

ROWS = [str(number) for number in range(12)]  # for six steps
EVERY_TWO = ("checkpointing.save_period=2", "checkpointing.keep_top_k=10")


class SlowPolicy(Policy):
    """Has written when the test says so."""

    is_written = False

    def is_save_written(self) -> bool:
        return self.is_written


def test_nothing_waits_for_the_disk_until_it_has_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SlowPolicy()
    writer = CheckpointWriter(tmp_path, policy)
    state = run_state(4)
    writer.begin(state)
    for _ in range(3):
        assert writer.advance() is None
    assert writer._save is not None
    writer._save.work.result(timeout=30)
    monkeypatch.setattr(saving.time, "monotonic", lambda began=time.monotonic, ahead=1000.0: began() + ahead)
    assert latest_checkpoint(tmp_path) is None
    policy.is_written = True
    saved = writer.wait(30)  # as if the loop had done something else for 1000 s
    assert saved is not None and saved.step == 4
    assert 0.5 < saved.seconds < 0.5 + 5, "how long writing takes, not how long the loop did other things"
    assert saved.path == latest_checkpoint(tmp_path) and load_state(saved.path).ledger == state.ledger
    assert writer.advance() is None and writer.wait() is None


def test_a_save_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, SlowPolicy())
    writer.begin(run_state(4))
    with pytest.raises(StalledError, match=r"of step 4: not written within 0\.1 s \(deadlines\.checkpoint\)"):
        writer.wait(0.1)
    assert writer.wait() is None
    assert save_checkpoint(tmp_path, run_state(6), Policy()) == latest_checkpoint(tmp_path)


@pytest.mark.parametrize("where", ["ranks", "driver", "end"])
def test_a_failure_is_raised_once_and_leaves_the_one_before(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Policy):
        def is_save_written(self) -> bool:
            if where == "ranks":
                raise PolicyError("policy rank 1: no space left on device")
            return True

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    first = save_checkpoint(tmp_path, run_state(2), Policy())
    if where != "ranks":
        monkeypatch.setattr(saving, {"driver": "write_state", "end": "complete"}[where], fail)
    writer = CheckpointWriter(tmp_path, Failing())
    writer.begin(run_state(4))
    with pytest.raises((PolicyError, OSError), match="no space left on device"):
        writer.wait(30)
    assert writer.advance() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", first.name]


def test_a_kill_in_any_phase_leaves_the_one_before_and_the_next_run_saves(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, run_state(2), Policy())
    for num_phases in range(4):
        policy = SlowPolicy()
        writer = CheckpointWriter(tmp_path, policy)  # of a run that ends without another word
        writer.begin(run_state(4))
        for _ in range(num_phases):
            writer.advance()
        assert latest_checkpoint(tmp_path) == first
    shutil.rmtree(first)
    assert save_checkpoint(tmp_path, run_state(4), Policy()) == latest_checkpoint(tmp_path)
    assert not list(tmp_path.glob("tmp_*"))


def begun(run: Run) -> list[tuple[int, int]]:
    """Note each save's step, and the newest complete checkpoint when it began."""
    noted: list[tuple[int, int]] = []
    begin = run.saver._writer.begin

    def note(state: object, *, with_optimizer: bool) -> None:
        noted.append((run.state.step, max(complete_checkpoints(run.saver.root), default=0)))
        begin(state, with_optimizer=with_optimizer)  # type: ignore[arg-type]

    run.saver._writer.begin = note  # type: ignore[method-assign,assignment]
    return noted


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, ROWS, *EVERY_TWO)
    noted = begun(run)
    run.policy.is_save_written = lambda: run.state.step >= 4  # type: ignore[method-assign]
    assert drive(run) is None
    assert noted == [(2, 0), (4, 2), (6, 4)]
    assert list(complete_checkpoints(run.saver.root)) == [2, 4, 6] and run.is_complete
    assert sorted(trained(tmp_path)) == list(range(12))


@pytest.mark.parametrize(
    ("where", "saved"),
    [
        ("policy.finish_save 1", []),  # the policy may have failed: nothing more is asked of it
        ("policy.begin_save 2", [2]),
    ],
)
def test_a_policy_that_cannot_write_ends_the_run_at_the_next_step(tmp_path: Path, where: str, saved: list[int]) -> None:
    failure = PolicyError("policy rank 0: no space left on device")
    run = make_run(tmp_path, ROWS, *EVERY_TWO, failures={where: failure})
    assert drive(run) is failure
    assert run.state.step in (2, 3, 4)
    assert list(complete_checkpoints(run.saver.root)) == saved
    assert drive(make_run(tmp_path, ROWS, *EVERY_TWO)) is None
    assert policy_step(tmp_path) == 6
    assert sorted(trained(tmp_path)) == list(range(12)), "a prompt was trained twice or never"
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 7))


def test_a_failure_of_the_drivers_part_is_saved_again_before_the_run_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state, failure = saving.write_state, OSError(errno.EIO, "the disk was away")
    left = [failure]

    def fail_once(*arguments: object) -> None:
        if left:
            raise left.pop()
        write_state(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_state", fail_once)
    run = make_run(tmp_path, ROWS, *EVERY_TWO)
    assert drive(run) is failure
    assert list(complete_checkpoints(run.saver.root)) == [run.state.step]
    assert drive(make_run(tmp_path, ROWS, *EVERY_TWO)) is None
    assert sorted(trained(tmp_path)) == list(range(12)), "a prompt was trained twice or never"


def test_a_rank_that_could_not_write_writes_again_before_the_run_leaves(tmp_path: Path) -> None:
    failure = RunError("policy rank 3 could not write its part of a checkpoint: the disk was away")
    run = make_run(tmp_path, ROWS, *EVERY_TWO, failures={"policy.is_save_written 1": failure})
    assert drive(run) is failure
    assert list(complete_checkpoints(run.saver.root)) == [run.state.step], "the steps since the last one are lost"
    assert drive(make_run(tmp_path, ROWS, *EVERY_TWO)) is None
    assert sorted(trained(tmp_path)) == list(range(12)), "a prompt was trained twice or never"


def test_a_run_that_fails_beside_a_save_completes_it_first(tmp_path: Path) -> None:
    failure = EngineError("engine 0 died")
    run = make_run(tmp_path, ROWS, *EVERY_TWO, failures={"generation.update_weights 4": failure})
    assert drive(run) is failure  # in step 3, while the checkpoint of step 2 is perhaps being written
    assert list(complete_checkpoints(run.saver.root)) == [2, 3]


@pytest.mark.parametrize(
    ("options", "due", "lacking"),
    [
        ((), [], [1, 2, 3, 4]),  # the period of these runs is longer
        (("checkpointing.save_period=2",), [2, 4], [1, 2, 3, 4]),
        (("checkpointing.save_period=1", "checkpointing.enabled=false"), [], []),
    ],
)
def test_when_a_step_should_be_in_a_checkpoint(
    tmp_path: Path, options: tuple[str, ...], due: list[int], lacking: list[int]
) -> None:
    run = make_run(tmp_path, ROWS, *options)
    found_due, found_lacking = [], []
    for step in range(1, 5):
        run.state.step = step
        found_due += [step] if run.saver.is_due else []
        found_lacking += [step] if run.saver.lacks_step else []
    run.state.saved_step = 4
    assert not run.saver.lacks_step
    run.close()
    assert (found_due, found_lacking) == (due, lacking)


def test_the_seconds_of_a_save_are_in_the_next_record(tmp_path: Path) -> None:
    run = make_run(tmp_path, ROWS, "checkpointing.save_period=2")
    begin = run.policy.begin_save

    def slow(*paths: Path, with_optimizer: bool) -> None:
        time.sleep(0.05)
        begin(*paths, with_optimizer=with_optimizer)

    run.policy.begin_save = slow  # type: ignore[method-assign]
    assert drive(run) is None
    seconds = [record["timing/train/checkpointing"] for record in records(tmp_path)]
    assert [value >= 0.05 for value in seconds] == [False, False, True, False, True, False]
