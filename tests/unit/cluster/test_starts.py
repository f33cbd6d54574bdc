"""When a run may begin, who is missing, and how often a start is tried."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from recipes.cluster.starts import Starts, wrong_input
from recipes.errors import BringUpError, ConfigError, EngineError, Problem, RunError

SECONDS = 30.0  # far more than any wait here takes


def starts_of(*sizes: int, min_share: float = 0.95, max_starts: int = 2) -> Starts:
    groups = [[f"{'ab'[group]}{number}" for number in range(size)] for group, size in enumerate(sizes)]
    return Starts(*groups, max_starts=max_starts, min_share=min_share)


@pytest.mark.parametrize(
    ("size", "min_share", "num_lost", "begins"),
    [
        (1, 0.95, 0, True),
        (1, 0.1, 1, False),
        (2, 0.95, 1, False),
        (2, 0.5, 1, True),
        (20, 0.95, 1, True),
        (20, 0.95, 2, False),
        (144, 0.95, 7, True),
        (144, 0.95, 8, False),
        (10, 0.7, 3, True),  # 0.7 * 10 is above 7 in floating point
    ],
)
def test_the_run_begins_with_the_share_and_names_the_others(
    size: int, min_share: float, num_lost: int, begins: bool
) -> None:
    starts = starts_of(size, min_share=min_share)
    for number in range(size):
        if number < num_lost:
            assert starts.failed(f"a{number}", EngineError(f"a{number}: no memory"), node=f"n{number}")
            assert not starts.failed(f"a{number}", "a card is broken", node=f"n{number}")
        else:
            starts.succeeded(f"a{number}")
    missing = {f"a{number}": f"start 2 of 2 failed on node n{number}: a card is broken" for number in range(num_lost)}
    assert starts.missing() == missing
    assert starts.num_failed == 2 * num_lost
    if begins:
        starts.wait(SECONDS)
        return
    with pytest.raises(RunError, match=rf"{size - num_lost} of {size} are up") as raised:
        starts.wait(SECONDS)
    assert all(f"{name}: {reason}" in str(raised.value) for name, reason in missing.items())


def test_each_group_needs_its_share() -> None:
    starts = starts_of(3, 1, min_share=0.5, max_starts=1)
    for name in ("a0", "a1", "a2"):
        starts.succeeded(name)
    starts.failed("b0", "no file")
    with pytest.raises(RunError, match="0 of 1 are up, and 1 must be") as raised:
        starts.wait(SECONDS)
    assert "b0: start 1 of 1 failed: no file" in str(raised.value) and "a0" not in str(raised.value)
    assert raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("failed", "exit_code", "last"),
    [
        ({"a1": "n2"}, 69, "  on node n2"),
        ({"a0": "n3", "a2": "n2"}, 69, "  on node n2, node n3"),
        ({"a1": ""}, 1, "  a1: start 1 of 1 failed: x"),  # nobody knows where
        ({"a0": "n1", "a1": "n2", "a2": "n3"}, 1, "  a2: start 1 of 1 failed on node n3: x"),  # not for its nodes
        ({"a1": "n2", "b0": "n5"}, 69, "  on node n2, node n5"),  # of a single one nothing else is known
    ],
)
def test_what_fails_on_some_nodes_only_has_a_status_of_its_own(
    failed: dict[str, str], exit_code: int, last: str
) -> None:
    starts = starts_of(3, 1, max_starts=1)
    for name in ("a0", "a1", "a2", "b0"):
        if name in failed:
            starts.failed(name, "x", node=failed[name])
        else:
            starts.succeeded(name)
    with pytest.raises(RunError) as raised:
        starts.wait(SECONDS)
    assert (raised.value.exit_code, str(raised.value).splitlines()[-1]) == (exit_code, last)


def test_a_group_of_which_none_comes_up_blames_no_node() -> None:
    """The others are of another kind: judges of one model say nothing of the nodes of another's."""
    starts = starts_of(3, 2, max_starts=1)
    for name in ("a0", "a1", "a2"):
        starts.succeeded(name)
    for number in range(2):
        starts.failed(f"b{number}", "no such model", node=f"n{number}")
    with pytest.raises(RunError) as raised:
        starts.wait(SECONDS)
    assert raised.value.exit_code == 1


def test_every_node_on_which_a_member_failed_is_named_and_none_from_before_it_was_up() -> None:
    starts = starts_of(2)
    starts.succeeded("a0")
    starts.failed("a1", "x", node="n1")
    starts.succeeded("a1")
    starts.lost("a1", "it died")
    for node in ("n2", "n3"):
        starts.failed("a1", "x", node=node)
    with pytest.raises(BringUpError) as raised:
        starts.wait(SECONDS)
    assert str(raised.value).splitlines()[-1] == "  on node n2, node n3"


def test_a_wrong_configuration_is_a_wrong_input_also_where_others_are_up() -> None:
    starts = starts_of(3)
    starts.succeeded("a0")
    wrong = ConfigError(Problem(where="a key", wrong="there is no such argument", fix="remove it"))
    assert not starts.failed("a1", EngineError("a1: ConfigError"), node="n2", wrong=wrong_input(wrong))
    with pytest.raises(ConfigError) as raised:
        starts.wait(SECONDS)
    assert raised.value.exit_code == 2


def test_the_whole_time_is_there_again_when_one_is_lost_before_the_run_begins() -> None:
    starts = starts_of(3, min_share=0.6)
    starts.succeeded("a0")
    threading.Timer(0.2, starts.succeeded, ["a1"]).start()
    threading.Timer(0.3, starts.lost, ["a1", "it died"]).start()
    threading.Timer(0.8, starts.succeeded, ["a1"]).start()
    starts.wait(SECONDS)
    assert list(starts.missing()) == ["a2"]


def test_a_watcher_that_fails_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> None:
        raise KeyError("bundles")

    async def main() -> None:
        starts.watch("a1", watch(), asyncio.get_running_loop())
        while not starts.num_failed:
            await asyncio.sleep(0.01)

    starts = starts_of(2, min_share=0.5)
    starts.succeeded("a0")
    starts.succeeded("a1")
    asyncio.run(asyncio.wait_for(main(), SECONDS))
    assert starts.missing()["a1"] == "start 1 of 2 failed: nobody watches it any more: KeyError: 'bundles'"
    assert "a1 is not watched any more" in caplog.text and "Traceback" in caplog.text
    starts.wait(SECONDS)


def test_those_that_are_slow_get_as_long_again_and_those_that_failed_are_not_waited_for() -> None:
    starts = starts_of(2, min_share=0.5)
    threading.Timer(0.2, starts.succeeded, ["a0"]).start()
    began = time.monotonic()
    starts.wait(SECONDS)  # a1 never ends
    assert 0.3 < time.monotonic() - began < SECONDS / 2
    assert starts.missing() == {"a1": "its first start has not ended"}
    starts.failed("a1", "no memory")
    began = time.monotonic()
    starts.wait(SECONDS)
    assert time.monotonic() - began < 1.0


def test_a_start_that_never_ends_is_late() -> None:
    starts = starts_of(1)
    with pytest.raises(RunError, match="a0: its first start has not ended"):
        starts.wait(0.1)


def test_a_member_that_comes_back_is_not_missing_and_is_tried_as_often_again() -> None:
    starts = starts_of(1)
    assert starts.failed("a0", "x")
    starts.succeeded("a0")
    assert starts.missing() == {}
    starts.lost("a0", "its node is gone")
    assert starts.missing() == {"a0": "its node is gone"}
    assert starts.failed("a0", "x") and not starts.failed("a0", "x\n y" * 1000)
    assert len(starts.missing()["a0"]) <= 400 and "\n" not in starts.missing()["a0"]


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (EngineError("no memory"), False),
        (TimeoutError(), False),
        (ConfigError(Problem(where="a key", wrong="there is no such argument", fix="remove it")), True),
    ],
)
def test_a_wrong_configuration_is_tried_once(error: Exception, is_final: bool) -> None:
    assert starts_of(1).failed("a0", error, wrong=wrong_input(error)) is not is_final
