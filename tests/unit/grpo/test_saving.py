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
from recipes.grpo.saving import CheckpointSaver, save_checkpoint
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
    saver = CheckpointSaver(tmp_path, policy)
    state = run_state(4)
    saver.begin(state)
    for _ in range(3):
        assert saver.advance() is None
    assert saver._save is not None
    saver._save.work.result(timeout=30)
    monkeypatch.setattr(saving.time, "monotonic", lambda began=time.monotonic, ahead=1000.0: began() + ahead)
    assert latest_checkpoint(tmp_path) is None
    policy.is_written = True
    saved = saver.wait(30)  # as if the loop had done something else for 1000 s
    assert saved is not None and saved.step == 4
    assert 0.5 < saved.seconds < 0.5 + 5, "how long writing takes, not how long the loop did other things"
    assert saved.path == latest_checkpoint(tmp_path) and load_state(saved.path).ledger == state.ledger
    assert saver.advance() is None and saver.wait() is None


def test_a_save_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, SlowPolicy())
    saver.begin(run_state(4))
    with pytest.raises(StalledError, match=r"of step 4: not written within 0\.1 s \(deadlines\.checkpoint\)"):
        saver.wait(0.1)
    assert saver.wait() is None
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
    saver = CheckpointSaver(tmp_path, Failing())
    saver.begin(run_state(4))
    with pytest.raises((PolicyError, OSError), match="no space left on device"):
        saver.wait(30)
    assert saver.advance() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", first.name]


def test_a_kill_in_any_phase_leaves_the_one_before_and_the_next_run_saves(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, run_state(2), Policy())
    for num_phases in range(4):
        policy = SlowPolicy()
        saver = CheckpointSaver(tmp_path, policy)  # of a run that ends without another word
        saver.begin(run_state(4))
        for _ in range(num_phases):
            saver.advance()
        assert latest_checkpoint(tmp_path) == first
    shutil.rmtree(first)
    assert save_checkpoint(tmp_path, run_state(4), Policy()) == latest_checkpoint(tmp_path)
    assert not list(tmp_path.glob("tmp_*"))


def begun(run: Run) -> list[tuple[int, int]]:
    """Note each save's step, and the newest complete checkpoint when it began."""
    noted: list[tuple[int, int]] = []
    begin = run._saver.begin

    def note(state: object, *, with_optimizer: bool) -> None:
        noted.append((run.state.step, max(complete_checkpoints(run.checkpoints), default=0)))
        begin(state, with_optimizer=with_optimizer)  # type: ignore[arg-type]

    run._saver.begin = note  # type: ignore[method-assign,assignment]
    return noted


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, ROWS, *EVERY_TWO)
    noted = begun(run)
    run.policy.is_save_written = lambda: run.state.step >= 4  # type: ignore[method-assign]
    assert drive(run) is None
    assert noted == [(2, 0), (4, 2), (6, 4)]
    assert list(complete_checkpoints(run.checkpoints)) == [2, 4, 6] and run.is_complete
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
    assert list(complete_checkpoints(run.checkpoints)) == saved
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
    assert list(complete_checkpoints(run.checkpoints)) == [run.state.step]
    assert drive(make_run(tmp_path, ROWS, *EVERY_TWO)) is None
    assert sorted(trained(tmp_path)) == list(range(12)), "a prompt was trained twice or never"


def test_a_rank_that_could_not_write_writes_again_before_the_run_leaves(tmp_path: Path) -> None:
    failure = RunError("policy rank 3 could not write its part of a checkpoint: the disk was away")
    run = make_run(tmp_path, ROWS, *EVERY_TWO, failures={"policy.is_save_written 1": failure})
    assert drive(run) is failure
    assert list(complete_checkpoints(run.checkpoints)) == [run.state.step], "the steps since the last one are lost"
    assert drive(make_run(tmp_path, ROWS, *EVERY_TWO)) is None
    assert sorted(trained(tmp_path)) == list(range(12)), "a prompt was trained twice or never"


def test_a_run_that_fails_beside_a_save_completes_it_first(tmp_path: Path) -> None:
    failure = EngineError("engine 0 died")
    run = make_run(tmp_path, ROWS, *EVERY_TWO, failures={"generation.update_weights 4": failure})
    assert drive(run) is failure  # in step 3, while the checkpoint of step 2 is perhaps being written
    assert list(complete_checkpoints(run.checkpoints)) == [2, 3]
