"""Groups that teach nothing are replaced for their step, and every prompt stands in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from recipes.errors import RunError
from recipes.grpo.data import NO_VARIANCE
from recipes.types import Completion, Group
from tests.unit.grpo.collector_case import P, Sampler, Setup, eventually, make_setups

make = pytest.fixture(make_setups)


def differs(group: Group) -> bool:
    return len({rollout.reward for rollout in group.rollouts}) > 1


def test_a_group_without_variance_is_replaced_at_once_and_stands_in_the_ledger(make: Callable[..., Setup]) -> None:
    setup = make(8, age=0, marks=dict.fromkeys((2, 3, 6, 7), "compared"))  # the others earn 1, whoever answers
    setup.collector.close()
    setup.collector = setup.new_collector(teaches=differs, max_gen_batches=3)
    setup.collector.start(version=0, last_step=2)
    assert setup.take(0) == [2, 3]
    setup.collector.set_version(1)
    assert setup.take(1) == [6, 7]
    failed = setup.collector.state().failed
    assert [(ref.row_index, reason) for ref, reason in failed] == [(row, NO_VARIANCE) for row in (0, 1, 4, 5)]
    assert setup.drawn() == list(range(8))
    assert setup.collector.environment_metrics()["num_groups_replaced"] == 4.0


class Delayed(Sampler):
    """Answers each prompt after seconds of its own."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.seconds = seconds

    async def generate(self, *given: Any, affinity: int, **named: Any) -> Completion:
        await asyncio.sleep(self.seconds(affinity))
        return await super().generate(*given, affinity=affinity, **named)


@pytest.mark.parametrize(
    "seconds", [lambda row: 0.02 * row, lambda row: 0.02 * (8 - row), lambda row: 0.03 * (row % 2)]
)
def test_the_groups_of_a_step_do_not_depend_on_which_answer_ends_first(
    make: Callable[..., Setup], seconds: Callable[[int], float]
) -> None:
    """So dynamic sampling alone keeps the bits of a run the same; prompts that are drawn ahead do not."""
    setup = make(8, age=0, marks=dict.fromkeys((1, 4, 5, 7), "compared"))
    setup.collector.close()
    setup.groups.sampler = Delayed(seconds)
    setup.collector = setup.new_collector(teaches=differs, max_gen_batches=9)
    setup.collector.start(version=0, last_step=2)
    trained = [setup.take(0)]
    setup.collector.set_version(1)
    assert [*trained, setup.take(1)] == [[1, 4], [5, 7]]
    failed = [ref.row_index for ref, _ in setup.collector.state().failed]
    assert failed == [0, 2, 3, 6], "the ledger of a checkpoint is one of its bits"


def test_prompts_drawn_ahead_replace_those_that_teach_nothing_and_the_others_train_later(
    make: Callable[..., Setup],
) -> None:
    """Of four prompts drawn at once for a step of two, what is left over waits for the next step."""
    setup = make(8, age=1, marks=dict.fromkeys((0, 2, 3, 5, 6, 7), "compared"))
    setup.collector.close()
    setup.collector = setup.new_collector(teaches=differs, max_gen_batches=9, num_prompts_ahead=2)
    setup.collector.start(version=0, last_step=3)
    trained = [setup.take(0), setup.take(1)]
    setup.collector.set_version(1)
    setup.collector.set_version(2)
    trained.append(setup.take(2))
    assert sorted(row for rows in trained for row in rows) == [0, 2, 3, 5, 6, 7]
    assert setup.collector.environment_metrics()["num_groups_replaced"] == 2.0


def test_a_group_that_no_step_may_train_on_any_more_is_sampled_again(make: Callable[..., Setup]) -> None:
    setup = make(6, age=0, marks=dict.fromkeys(range(6), "compared"))
    setup.collector.close()
    setup.collector = setup.new_collector(teaches=differs, max_gen_batches=9, num_prompts_ahead=1)
    setup.collector.start(version=0, last_step=3)
    trained = []
    for step in range(3):
        trained += setup.take(step)
        eventually(lambda: setup.collector.num_in_flight() == 0)
        state = setup.collector.state()
        assert not state.finished and len(state.set_aside) <= 1
        setup.collector.set_version(step + 1)
    assert sorted(trained) == list(range(6))
    assert setup.collector.environment_metrics()["num_prompts_returned"] >= 2.0
    assert not setup.collector.state().failed


def test_prompts_drawn_ahead_belong_to_the_first_batch(make: Callable[..., Setup]) -> None:
    """With one batch of four prompts, two may teach nothing and the third ends the run."""
    for marks, ends in ((dict.fromkeys((1, 2), "compared"), False), ({1: "compared"}, True)):
        setup = make(4, age=0, marks=marks)
        setup.collector.close()
        setup.collector = setup.new_collector(teaches=differs, max_gen_batches=1, num_prompts_ahead=2)
        setup.collector.start(version=0, last_step=1)
        if ends:
            with pytest.raises(RunError, match="the answers to 3 prompts drawn for it"):
                setup.take(0)
        else:
            assert setup.take(0) == [1, 2]


def test_data_that_teaches_nothing_ends_with_a_message(make: Callable[..., Setup]) -> None:
    setup = make(20, age=0)
    setup.collector.close()
    setup.collector = setup.new_collector(teaches=differs, max_gen_batches=2)
    setup.collector.start(version=0, last_step=2)
    with pytest.raises(RunError, match=r"step 1: the answers to 3 prompts drawn for it earned the same, too many for"):
        setup.take(0)
    assert len(setup.drawn()) <= 3 + P


def test_the_end_of_data_that_teaches_nothing_ends_the_loop(make: Callable[..., Setup]) -> None:
    setup = make(4, age=0)
    setup.collector.close()
    setup.collector = setup.new_collector(teaches=differs, max_gen_batches=9)
    setup.collector.start(version=0, last_step=2)
    assert setup.take(0) == []
