"""Waiting for groups: what comes out, what ends the wait, and what a file of groups keeps."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recipes.errors import RunError, StalledError
from recipes.grpo.buffer import ReplayBuffer, read_groups, write_groups
from recipes.types import Group, PromptRef, Rollout, RolloutStatus
from tests.groups import as_lists, group_of

AGE = 1


def make_buffer() -> ReplayBuffer:
    return ReplayBuffer(num_prompts_per_step=2, max_trajectory_age_steps=AGE)


def group(row: int, *, epoch: int = 0, target: int = 0, version: int = 0) -> Group:
    rollouts = [
        Rollout(turns=(), status=RolloutStatus.ENV_FAILED, reason=f"half a pair: \ud800 {row}", reward=None),
        Rollout(turns=(), status=RolloutStatus.COMPLETED, reason="right", reward=1.0, metrics={"share": float("nan")}),
    ]
    prompt = PromptRef(epoch=epoch, row_index=row, prompt_id=f"{row:016x}")
    return group_of(rollouts, prompt=prompt, target_step=target, version=version, prompt_text="q")


def take(buffer: ReplayBuffer, step: int = 0, seconds: float = 5.0) -> list[tuple[int, int]]:
    groups = buffer.take(step, deadline_seconds=seconds, waiting_for=lambda: "the oldest is row 7")
    return [(one.prompt.epoch, one.prompt.row_index) for one in groups]


@pytest.mark.timeout(30)
def test_a_request_to_stop_just_before_the_wait_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make_buffer()
    wait = buffer._changed.wait

    def interrupted(seconds: float) -> bool:
        buffer.close()  # as a signal's handler does, after the last look and before anything waits
        assert seconds <= 1.0  # a signal is seen so soon
        return wait(0.0)

    monkeypatch.setattr(buffer._changed, "wait", interrupted)
    assert take(buffer, seconds=600.0) == []


def test_groups_come_whole_by_step_and_oldest_prompt_first() -> None:
    buffer = make_buffer()
    for one in (group(1, epoch=1, target=1), group(9), group(3, target=1), group(2)):
        buffer.add(one)
    assert len(buffer) == 4
    assert {one.prompt.row_index for one in buffer.groups()} == {1, 2, 3, 9}
    assert take(buffer, 0) == [(0, 2), (0, 9)]
    assert len(buffer) == 2
    assert take(buffer, 1) == [(0, 3), (1, 1)]
    assert len(buffer) == 0 and buffer.groups() == []


def test_a_group_as_old_as_allowed_is_trained_on_and_an_older_one_never() -> None:
    buffer = make_buffer()
    for version in (3, 4 - AGE):
        buffer.add(group(version, target=4, version=version))
    assert len(take(buffer, 4)) == 2
    for version in (4, 4 - AGE):
        buffer.add(group(version, target=5, version=version))
    with pytest.raises(RuntimeError, match=r"^0:3:0{15}3 was started at version 3, too old for 5$"):
        take(buffer, 5)


def test_a_wait_without_new_groups_ends_by_name() -> None:
    buffer = make_buffer()
    buffer.add(group(0))
    message = "step 1: 1 of 2 groups after 0.02 s without a new one (deadlines.progress); the oldest is row 7"
    with pytest.raises(StalledError) as caught:
        take(buffer, seconds=0.02)
    assert str(caught.value) == message


def test_every_new_group_starts_the_deadline_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, waits = make_buffer(), itertools.count()
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> bool:
        number = next(waits)
        if number % 2:
            now[0] += seconds
        else:
            buffer._groups[1 if number < 4 else 0].append(group(number))
        return True

    monkeypatch.setattr(buffer._changed, "wait", wait)
    assert take(buffer, seconds=1.5) == [(0, 4), (0, 6)]
    assert now[0] == 103.0, "three waits of a second each, the deadline is 1.5 s"


def test_the_first_failure_is_raised_at_once_and_again_though_groups_are_there() -> None:
    buffer = make_buffer()
    buffer.add(group(0))
    for text in ("first", "second"):
        buffer.fail(RunError(text))
    buffer.close()
    for _ in range(2):
        with pytest.raises(RunError, match="first"):
            take(buffer, seconds=600.0)


@pytest.mark.parametrize("wake", ["add", "fail", "close"])
def test_whoever_waits_is_woken(wake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait itself is without end here, so that only a notification ends it."""
    buffer, is_waiting = make_buffer(), threading.Event()
    buffer.add(group(0))
    wait = buffer._changed.wait

    def forever(_seconds: float) -> bool:
        is_waiting.set()
        return wait(20.0)

    monkeypatch.setattr(buffer._changed, "wait", forever)
    ended: list[object] = []

    def taker() -> None:
        try:
            ended.append(take(buffer, seconds=600.0))
        except RunError as error:
            ended.append(str(error))

    thread = threading.Thread(target=taker)
    thread.start()
    assert is_waiting.wait(10.0)
    began = time.monotonic()
    {"add": lambda: buffer.add(group(1)), "fail": lambda: buffer.fail(RunError("x")), "close": buffer.close}[wake]()
    thread.join(timeout=15.0)
    assert time.monotonic() - began < 15.0
    assert ended == [{"add": [(0, 0), (0, 1)], "fail": "x", "close": []}[wake]]


def test_a_file_of_groups_keeps_every_field(tmp_path: Path) -> None:
    groups = [group(3, epoch=2, target=5, version=4), group(1)]
    write_groups(tmp_path / "groups", groups, [one.tokens for one in groups])
    found, tokens = read_groups(tmp_path / "groups")
    assert [repr(one) for one in found] == [repr(without_tokens(one)) for one in groups]
    assert [as_lists(one) for one in tokens] == [as_lists(one.tokens) for one in groups]
    write_groups(tmp_path / "none", [], [])
    assert read_groups(tmp_path / "none") == ((), ())


def test_a_file_of_groups_without_trajectories_is_read(tmp_path: Path) -> None:
    write_groups(tmp_path / "groups", [group(1)], [group(1).tokens])
    arrays = load_file(tmp_path / "groups")
    older = {name: array for name, array in arrays.items() if "trajectories" not in name}
    assert len(older) == len(arrays) - 2
    save_file(older, tmp_path / "older")
    [tokens] = read_groups(tmp_path / "older")[1]
    assert tokens.trajectory(0) is None
    assert tokens.output_text(0) == group(1).tokens.output_text(0)


def test_a_header_keeps_its_calls_and_an_older_one_has_none(tmp_path: Path) -> None:
    one = group(1)
    called = replace(one, rollouts=tuple(replace(header, tool_calls=(3, 1)) for header in one.rollouts))
    write_groups(tmp_path / "groups", [called], [one.tokens])
    arrays = load_file(tmp_path / "groups")
    [found] = read_groups(tmp_path / "groups")[0]
    assert {header.tool_calls for header in found.rollouts} == {(3, 1)}
    older = bytes(arrays["headers"]).replace(b', "tool_calls": [3, 1]', b"")
    assert len(older) < len(arrays["headers"])
    save_file(arrays | {"headers": np.frombuffer(older, np.uint8)}, tmp_path / "older")
    [found] = read_groups(tmp_path / "older")[0]
    assert {header.tool_calls for header in found.rollouts} == {(0, 0)}


def without_tokens(one: Group) -> Group:
    return replace(one, tokens=None)
