"""Keystrokes at a terminal: both formats, what is exact, and which rows are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.contract.settings import NoSettings
from recipes.environments.verifiers.terminal_pivot import is_cheap, parse_task, score

Answer = Callable[..., dict[str, Any]]


def one(*keys: str, done: bool = False, **further: Any) -> dict[str, Any]:
    commands = [{"keystrokes": key, "is_blocking": True, "timeout_sec": 1} for key in keys]
    return {"state_analysis": "s", "explanation": "e", "commands": commands, "is_task_complete": done} | further


def two(*keys: str, **further: Any) -> dict[str, Any]:
    return {"analysis": "a", "plan": "p", "commands": [{"keystrokes": key} for key in keys]} | further


def reward(answer: Answer, expected: Any, said: Any, harness: str = "terminus_2", **row: Any) -> float:
    fields = {"expected_answer": json.dumps(expected), "metadata": {"harness": harness}} | row
    text = said if isinstance(said, str) else json.dumps(said)
    return score(answer(text), parse_task(fields, NoSettings())).reward


LS = two("ls\n")
ONE_LS = one("ls\n")


@pytest.mark.parametrize(
    ("harness", "expected", "said", "right"),
    [
        ("terminus_2", LS, LS, True),
        ("terminus_2", LS, two("ls\n", task_complete=True), True),  # too early costs nothing
        ("terminus_2", LS, {**LS, "commands": [{"keystrokes": "ls\n", "duration": 0.1}]}, True),
        ("terminus_2", LS, two("ls"), False),
        ("terminus_2", LS, two("ls\n", "pwd\n"), False),
        ("terminus_2", two("a", "b"), two("b", "a"), False),
        ("terminus_2", two("ab"), two("a", "b"), False),  # one by one, not put together
        ("terminus_2", two(), two(), True),
        ("terminus_2", two("x", task_complete=True), two("x"), False),
        ("terminus_2", two("x", task_complete=True), two("x", task_complete=True), True),
        ("terminus_2", LS, "<think>{}</think>" + json.dumps(LS), True),
        ("terminus_2", LS, "Here: " + json.dumps(LS), False),
        ("terminus_2", LS, {**LS, "note": "n"}, False),
        ("terminus_2", LS, {"commands": LS["commands"]}, False),
        ("terminus_2", LS, {**LS, "commands": ["ls\n"]}, False),
        ("terminus_2", LS, {**LS, "commands": [{"keystrokes": "ls\n", "duration": True}]}, False),
        ("terminus_2", LS, {**LS, "commands": [{"keystrokes": 7}]}, False),
        ("terminus_2", LS, {**LS, "commands": {"keystrokes": "ls\n"}}, False),
        ("terminus_2", LS, ONE_LS, False),
        ("terminus_1", ONE_LS, ONE_LS, True),
        ("terminus_1", ONE_LS, LS, False),
        ("terminus_1", ONE_LS, one("ls\n", is_task_complete="no"), False),
        ("terminus_1", one("x", done=True), one("x"), False),
        ("terminus_1", one("x", done=True), one("x", done=True), True),
        ("terminus_1", ONE_LS, one("ls\n", commands=[{"keystrokes": "ls\n"}]), False),
        ("terminus_1", ONE_LS, "[" * 100_000, False),
        ("terminus_1", ONE_LS, "", False),
        ("terminus_1", ONE_LS, "[]", False),
    ],
)
def test_only_the_experts_keystrokes_in_the_format_are_right(answer: Answer, harness, expected, said, right) -> None:
    assert reward(answer, expected, said, harness) == float(right)


def test_the_expected_answer_may_stand_in_the_metadata(answer: Answer) -> None:
    row = {"metadata": {"harness": "terminus_2", "expected_answer": json.dumps(LS)}}
    assert score(answer(json.dumps(LS)), parse_task(row, NoSettings())).reward == 1.0


@pytest.mark.parametrize(("threshold", "right"), [(0.5, True), (0.95, False), (None, False)])
def test_a_row_with_a_threshold_takes_what_is_like_enough(answer: Answer, threshold, right) -> None:
    row = {} if threshold is None else {"threshold": threshold}
    assert reward(answer, two("ls -la\n"), two("ls -l\n"), **row) == float(right)
    assert reward(answer, two("ls -la\n"), two("ls ", "-la\n"), **row) == float(threshold is not None)
    fields = {"expected_answer": json.dumps(LS), "metadata": {"harness": "terminus_2"}, **row}
    assert is_cheap(parse_task(fields, NoSettings())) == (threshold is None)


@pytest.mark.parametrize(
    "row",
    [
        {"metadata": {"harness": "terminus_3"}},
        {"metadata": {}},
        {"expected_answer": "no JSON"},
        {"expected_answer": '{"commands": ["ls"]}'},
        {"expected_answer": '{"analysis": "a", "plan": "p"}'},
        {"expected_answer": '{"commands": null}'},
        {"expected_answer": '{"commands": {"keystrokes": "ls"}}'},
        {"expected_answer": '{"commands": [{"duration": 1}]}'},
        {"expected_answer": '{"commands": [{"keystrokes": ["ls"]}]}'},
        {"threshold": "half"},
        {"threshold": True},
    ],
)
def test_a_row_that_no_answer_could_solve_is_refused(row) -> None:
    fields = {"expected_answer": json.dumps(LS), "metadata": {"harness": "terminus_2"}}
    with pytest.raises(ValueError, match=next(iter(row))):
        parse_task(fields | row, NoSettings())
