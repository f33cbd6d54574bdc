"""The collector's ordering: what is drawn when, what a checkpoint holds, what a failure does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.errors import EngineError, RequestError, RunError, StalledError
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.data import CollectorState
from recipes.rollouts.group import PolicyClient
from recipes.rollouts.teachers import Teachers
from recipes.types import RolloutStatus, Sampling
from tests.groups import as_lists
from tests.unit.grpo.collector_case import G, P, Sampler, Setup, eventually, make_setups

make = pytest.fixture(make_setups)


@pytest.mark.parametrize("age", [0, 1, 2])
def test_draws_exactly_age_steps_ahead(make: Callable[..., Setup], age: int) -> None:
    setup = make(40, age=age)
    setup.collector.start(version=0, last_step=10)
    for step in range(4):
        ahead = (step + age + 1) * P
        eventually(lambda ahead=ahead: setup.drawn() == list(range(ahead)))
        time.sleep(0.02)
        assert setup.drawn() == list(range(ahead)), "drew beyond the window"
        assert setup.take(step) == [step * P, step * P + 1]
        setup.collector.set_version(step + 1)


def test_windows_match_the_recorded_ones(golden_dir: Path, make: Callable[..., Setup]) -> None:
    cases = json.loads((golden_dir / "grpo" / "target_weights.json").read_text(encoding="utf-8"))["cases"]
    assert cases
    for case in cases:
        given = case["inputs"]
        start, age = given["initial_weight_version"], given["max_trajectory_age_steps"]
        setup = make(100, age=age)
        setup.sampler.open.clear()
        setup.groups.rollout_seconds = 60.0
        setup.collector.start(version=start, last_step=1000)
        current = start
        for version, want in zip(given["generation_versions"], case["expected"]["targets"], strict=True):
            for current in range(current + 1, version + 1):  # noqa: B020 - walks through every version
                setup.collector.set_version(current)
            setup.collector.submit(asyncio.sleep(0)).result()  # what was asked of the collector's loop is done
            begun = {drawn.target_step for drawn in setup.collector.state().in_flight}
            # What the reference may still begin at a later version excludes the target that is due: it was begun
            # under an earlier version.
            assert sorted(target for target in begun if target > version or version == start) == want, case["name"]
        setup.collector.close()


def test_never_draws_beyond_the_last_step(make: Callable[..., Setup]) -> None:
    setup = make(40, age=1)
    setup.collector.start(version=0, last_step=1)
    assert setup.take(0) == [0, 1]
    setup.collector.set_version(1)
    time.sleep(0.05)
    assert setup.drawn() == [0, 1]


def test_end_of_data_ends_the_loop_instead_of_starving_it(make: Callable[..., Setup]) -> None:
    setup = make(5, age=1)
    setup.collector.start(version=0, last_step=100)
    assert setup.take(0) == [0, 1]
    setup.collector.set_version(1)
    assert setup.take(1) == [2, 3]
    setup.collector.set_version(2)
    assert setup.take(2) == [], "one prompt is left, a step needs two"


def test_a_prompt_without_signal_is_replaced_and_recorded(make: Callable[..., Setup]) -> None:
    setup = make(8, age=0, marks={1: "broken"})
    setup.collector.start(version=0, last_step=2)
    assert setup.take(0) == [0, 2]
    ((ref, reason),) = setup.collector.state().failed
    assert (ref.row_index, reason) == (1, "env_failed: env down")


def test_too_many_failures_in_a_row_end_the_run(make: Callable[..., Setup]) -> None:
    setup = make(8, age=0, marks=dict.fromkeys(range(8), "broken"))
    setup.collector.start(version=0, last_step=2)
    with pytest.raises(RunError, match=r"3 prompts in a row failed, more than 1 steps of 2 .*env down"):
        setup.take(0)


def test_a_few_bad_prompts_in_a_row_are_replaced(make: Callable[..., Setup]) -> None:
    setup = make(8, age=0, marks=dict.fromkeys(range(P), "broken"))
    setup.collector.start(version=0, last_step=1)
    assert setup.take(0) == [2, 3]
    assert len(setup.collector.state().failed) == P


def test_a_rollout_over_its_deadline_has_no_reward(make: Callable[..., Setup]) -> None:
    setup = make(8, age=0, marks={0: "slow"})
    setup.groups.rollout_seconds = 0.3
    setup.collector.start(version=0, last_step=1)
    assert setup.take(0) == [1, 2]
    ((ref, reason),) = setup.collector.state().failed
    assert ref.row_index == 0
    assert reason == "timed_out: no verdict within 0.3 s (deadlines.rollout)"


def test_a_failed_request_costs_its_rollout_only(make: Callable[..., Setup]) -> None:
    setup = make(4, age=0)
    setup.sampler.failures = {
        (0, 0): RequestError("no answer within 5 s (deadlines.generation)"),
        (2, 0): RequestError("ValueError: odd"),
    }
    sampling = setup.collector.settings.sampling
    work = setup.collector.run_group({"row": 0}, sampling, affinity=7)
    (late, good, broken), _ = setup.collector.submit(work).result(timeout=60)
    assert (late.status, late.reward) == (RolloutStatus.ABORTED, None)
    assert late.reason == "no answer within 5 s (deadlines.generation)"
    assert (broken.status, broken.reason, broken.reward) == (RolloutStatus.ABORTED, "ValueError: odd", None)
    assert good.reward == 1.0
    assert setup.sampler.samples == {(7, rollout, 0) for rollout in range(G)}, "each has numbers of its own"


def test_what_only_measures_asks_no_teacher(make: Callable[..., Setup]) -> None:
    setup = make(4, age=0)
    setup.groups.teachers = Teachers({})  # none for any row: what is trained on ends without a verdict
    for num, is_valid in ((0, False), (2, True)):
        work = setup.collector.run_group({"row": 0}, setup.collector.settings.sampling, affinity=7, num=num)
        rollouts, _ = setup.collector.submit(work).result(timeout=60)
        assert [one.is_valid for one in rollouts] == [is_valid] * (num or G)


def test_a_group_is_finished_once_all_of_its_rollouts_have_ended(make: Callable[..., Setup]) -> None:
    setup = make(P, age=0, marks={0: "compared"})
    setup.sampler.failures = {(1, 0): RequestError("request lost")}
    setup.collector.start(version=0, last_step=1)
    groups = setup.buffer.take(0, deadline_seconds=5.0, waiting_for=setup.collector.waiting_for)
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    assert rewards == [[0.0, 1.0, 2.0], [1.0, None, 1.0]]


def test_a_dead_engine_reaches_the_train_loop_at_once(make: Callable[..., Setup]) -> None:
    setup = make(8, age=1)
    setup.sampler.failure = EngineError("engine 0 on node a died")
    setup.collector.start(version=0, last_step=2)
    start = time.monotonic()
    with pytest.raises(EngineError, match="engine 0 on node a"):
        setup.take(0, seconds=60.0)
    assert time.monotonic() - start < 5


def test_a_stall_names_what_is_in_flight(make: Callable[..., Setup]) -> None:
    setup = make(8, age=0)
    setup.sampler.open.clear()
    setup.groups.rollout_seconds = 60.0
    setup.collector.start(version=0, last_step=1)
    with pytest.raises(StalledError, match=r"0 of 2 groups.*oldest in flight: prompt 0:0:.* for step 1"):
        setup.take(0, seconds=0.2)
    setup.collector.paused = lambda: {"code": 9.0}  # type: ignore[method-assign]
    in_flight, _, waiting = setup.collector.waiting_for().partition("; ")
    assert in_flight.startswith("oldest in flight: prompt 0:0:")
    assert waiting == "0 prompts wait for paused environments: code"
    setup.sampler.open.set()


def test_a_resumed_run_trains_every_prompt_once(make: Callable[..., Setup]) -> None:
    setup = make(20, age=1)
    setup.collector.start(version=0, last_step=10)
    trained = setup.take(0)
    setup.sampler.open.clear()  # what follows stays in flight
    setup.collector.set_version(1)
    eventually(lambda: len(setup.buffer) == P and setup.drawn() == list(range(3 * P)))
    state = setup.collector.state()
    assert [group.prompt.row_index for group in state.finished] == [2, 3]
    assert [(drawn.position, drawn.target_step) for drawn in state.in_flight] == [(4, 2), (5, 2)]
    setup.collector.close()

    setup.sampler.open.set()
    setup.buffer = ReplayBuffer(num_prompts_per_step=P, max_trajectory_age_steps=1)
    setup.collector = setup.new_collector()
    setup.collector.restore(state)
    restored = setup.collector.state().finished_tokens
    assert [as_lists(one) for one in restored] == [as_lists(one) for one in state.finished_tokens]
    setup.collector.start(version=1, last_step=10)
    for step in range(1, 10):
        trained += setup.take(step)
        setup.collector.set_version(step + 1)
    assert sorted(trained) == list(range(20))
    assert len(set(trained)) == len(trained)


def test_skipped_positions_are_never_drawn(make: Callable[..., Setup]) -> None:
    setup = make(10, age=0)
    setup.collector.restore(CollectorState(position=0, in_flight=(), finished=(), failed=(), skipped=(0, 2, 3, 9)))
    setup.collector.start(version=0, last_step=10)
    assert setup.take(0) == [1, 4]
    assert setup.collector.state().skipped == (9,)
    for step in (1, 2):
        setup.collector.set_version(step)
        assert setup.take(step) == [2 * step + 3, 2 * step + 4]
    setup.collector.set_version(3)
    assert setup.take(3) == [], "the last row was trained before the data changed"
    assert setup.drawn() == [1, 4, 5, 6, 7, 8]


def test_sampling_is_clamped_to_the_context() -> None:
    sampler = Sampler()
    client = PolicyClient(sampler, Sampling(temperature=1.0, top_p=1.0, max_tokens=100), 16, 0, 0)
    asyncio.run(client.generate((1,) * 10, max_tokens=50))
    assert sampler.requests[0][1].max_tokens == 6
    full = asyncio.run(client.generate((1,) * 16, max_tokens=50))
    assert (full.token_ids, full.finish_reason) == ((), "length")
    assert len(sampler.requests) == 1, "nothing was asked of the engine"
