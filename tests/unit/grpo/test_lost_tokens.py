"""Groups whose tokens are lost are sampled again; every prompt is trained once, and the ledger is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.errors import StalledError, TokensLostError
from recipes.grpo.checkpoint import latest_checkpoint, load_state
from recipes.grpo.run import Run
from recipes.grpo.train import train
from recipes.types import TrainBatch
from tests.groups import LocalStore
from tests.unit.grpo.loop_case import LoopEnvironments, P, make_run, records, trained

STEPS = 3


def store_of(run: Run) -> LocalStore:
    store = run.collector.token_store
    assert isinstance(store, LocalStore)
    return store


def make(directory: Path, environments: LoopEnvironments) -> Run:
    names = [str(number) for number in range(STEPS * P + 4)]
    return make_run(directory, names, f"grpo.max_num_steps={STEPS}", environments=environments)


def test_a_step_whose_tokens_are_lost_begins_again_with_new_ones(tmp_path: Path) -> None:
    environments = LoopEnvironments()
    run = make(tmp_path, environments)
    calls: list[TrainBatch] = []

    def fetch(batch: TrainBatch) -> None:
        calls.append(batch)
        if len(calls) == 2:
            store_of(run).lost.append(batch.tokens[0])
            raise TokensLostError("the tokens of 1 group cannot be read")

    run.policy.fetch = fetch  # type: ignore[method-assign]
    try:
        train(run)
    finally:
        run.close()
    assert [record["step"] for record in records(tmp_path)] == list(range(1, STEPS + 1))
    assert sorted(trained(tmp_path)) == list(range(STEPS * P)), "every prompt is trained once"
    assert calls[1].tokens[0] is not calls[2].tokens[0] and calls[1].tokens[1] is calls[2].tokens[1]
    assert len(calls) == STEPS + 1
    assert sorted(environments.asked.count(str(row)) for row in range(STEPS * P)) == [2] * (STEPS * P - 1) + [4]


@pytest.mark.parametrize(
    "failure",
    [
        TokensLostError("a loss that cannot be found: all groups can be read"),
        StalledError("the tokens did not come"),
        ValueError("a row is longer than a micro-batch"),
    ],
)
def test_a_batch_that_cannot_be_fetched_ends_the_run_saved(tmp_path: Path, failure: Exception) -> None:
    names = [str(number) for number in range(STEPS * P)]
    run = make_run(tmp_path, names, failures={"policy.fetch 2": failure})
    with pytest.raises(type(failure)) as caught:
        train(run)
    run.save_after(caught.value)
    run.close()
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    saved = load_state(found)
    assert saved.step == 1
    waiting = [group.prompt.row_index for group in saved.collector.finished]
    assert len(waiting) == len(set(waiting)), "a group is in the checkpoint twice"
    again = make_run(tmp_path, names)
    train(again)
    again.close()
    assert sorted(trained(tmp_path)) == list(range(STEPS * P))


def test_a_checkpoint_holds_lost_groups_as_prompts_in_flight(tmp_path: Path) -> None:
    environments = LoopEnvironments()
    run = make(tmp_path, environments)
    try:
        run.generation.update_weights(0)
        run.collector.start(version=0, last_step=STEPS)
        groups = run.buffer.take(0, deadline_seconds=5.0, waiting_for=lambda: "")
        for group in groups:
            run.buffer.add(group)
        asked = len(environments.asked)
        store_of(run).lost.append(groups[1].tokens)
        state = run.collector.state()
        kept = {group.prompt.row_index for group in state.finished}
        drawn = {one.prompt.row_index for one in state.in_flight}
        assert groups[0].prompt.row_index in kept and not kept & drawn
        assert kept | drawn >= {0, 1}
        again = run.buffer.take(0, deadline_seconds=5.0, waiting_for=lambda: "")
        assert [group.prompt for group in again] == [group.prompt for group in groups]
        assert again[0].tokens is groups[0].tokens and again[1].tokens is not groups[1].tokens
        assert environments.asked[asked:].count(str(groups[1].prompt.row_index)) == 2
    finally:
        run.close()
