"""The expert's next action, and the policy's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.contract.verifier import function_call_item, message_item, reasoning_item
from recipes.environments.instances import AGENTS, servers_of
from recipes.environments.verifiers import single_step_tool_use_with_argument_comparison as single_step
from recipes.environments.verifiers.single_step_tool_use_with_argument_comparison import (
    VERIFIER,
    Comparator,
    Settings,
    parse_task,
    score,
)

CALL = {"type": "function_call", "name": "send", "arguments": '{"to": "ann", "text": "see you at noon", "count": 2}'}


def response(*calls: tuple[str, Any], text: str | None = None) -> dict[str, Any]:
    items = [message_item(text)] if text is not None else []
    for name, arguments in calls:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        items.append(function_call_item(name, written, call_id="c"))
    return {"output": items}


def reward(given: dict[str, Any], action: dict[str, Any] = CALL, **config: Any) -> float:
    compared = Comparator(**{"word_count_similarity_threshold": 0.1, **config})
    settings = Settings(tool_call_comparator_config=compared)
    return score(given, parse_task({"expected_action": action}, settings)).reward


RIGHT = {"to": "ann", "text": "see you at noon", "count": 2}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (RIGHT, 1.0),
        ({**RIGHT, "text": "See YOU at noon ann"}, 1.0),
        ({**RIGHT, "text": "something else entirely different"}, 0.0),
        ({**RIGHT, "to": "bob"}, 0.0),
        ({**RIGHT, "count": True}, 0.0),  # a bool is a number in Python, and 1
        ({**RIGHT, "count": 2.0}, 0.0),
        ({**RIGHT, "more": 1}, 0.0),
        ("{", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ([RIGHT], 0.0),
    ],
)
def test_arguments(arguments: Any, expected: float) -> None:
    assert reward(response(("send", arguments))) == expected


def test_other_actions() -> None:
    assert reward(response(("post", RIGHT))) == 0.0
    assert reward(response(text="I sent it")) == 0.0
    assert reward(response(("send", RIGHT), text="so:")) == 1.0
    assert reward({"output": [reasoning_item(["send"])]}) == 0.0
    assert reward({"output": []}) == 0.0
    message = {"type": "message", "content": "hello"}
    assert reward(response(text="anything"), message) == 1.0
    assert reward(response(("send", RIGHT)), message) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        (" \n\t", 0.0),
        ("\u200b\u00a0", 0.0),
        ("!", 0.0),
        ("...", 0.0),
        ("No.", 1.0),
        ("5", 1.0),
        ("\u662f", 1.0),
    ],
)
def test_a_message_without_a_word_is_not_the_one_that_was_expected(text: str, expected: float) -> None:
    assert reward(response(text=text), {"type": "message", "content": "hello"}) == expected


def test_surplus_calls_cost_nothing_unless_they_are_counted() -> None:
    three = response(("post", {}), ("send", RIGHT), ("send", RIGHT))
    assert reward(three) == 1.0
    counted = {"word_count_similarity_threshold": 0.1, "parallel_tool_call_rewarding": True}
    assert reward(three, **counted) == 0.0
    assert reward(three, **counted, allow_superset=True, parallel_tool_call_reward_mode="f1") == pytest.approx(0.5)


def test_a_batch_is_matched_as_a_whole() -> None:
    """The first call fits both expected ones: only the other order of pairs matches all."""
    texts = ["one two three", "one two four"]
    batch = {"type": "function_call_batch", "calls": [{**CALL, "arguments": json.dumps({"t": t})} for t in texts]}
    given = response(("send", {"t": "one two three four"}), ("send", {"t": "three"}))
    assert reward(given, batch, word_count_similarity_threshold=0.3) == 0.0
    given = response(("send", {"t": "one two three four"}), ("send", {"t": "one three three"}))
    assert reward(given, batch, word_count_similarity_threshold=0.3) == 1.0


def test_published_instances_have_their_thresholds() -> None:
    servers = servers_of({})
    ours = {name: own.settings for name, own in servers.items() if "step_tool" in name}
    thresholds = {
        name.partition("single_step")[0]: ours[agent.server].tool_call_comparator_config.word_count_similarity_threshold
        for name, agent in AGENTS.items()
        if name in VERIFIER.agents
    }
    assert thresholds == {"": 0.1, "toolcall_schema_": 0.1, "search_pivot_": 0.3, "swe_pivot_": 0.0}


@pytest.mark.parametrize("name", ["single_step_tool_use_with_argument_comparison", "swe_pivot"])
def test_real_rows_reward_the_expert(name: str, gym_row: Callable[..., dict[str, Any]]) -> None:
    for index in range(5):
        row = gym_row(name, index)
        action = row["expected_action"]
        calls = action.get("calls", [action] if action["type"] == "function_call" else [])
        given = response(*[(call["name"], call["arguments"]) for call in calls], text=action.get("content"))
        task = parse_task(row, Settings())
        assert score(given, task).reward == 1.0
        assert score({"output": []}, task).reward == 0.0


@pytest.mark.parametrize(
    "action",
    [
        *(None, {}, {"type": "tool"}, {"type": "function_call"}, {**CALL, "arguments": "{"}),
        {"type": "function_call_batch", "calls": []},
    ],
)
def test_bad_row(action: Any) -> None:
    with pytest.raises(ValueError, match=r"^field 'expected_action"):
        parse_task({"expected_action": action}, Settings())


def test_a_matching_of_many_calls_is_found_without_recursion() -> None:
    size = 1100  # each row but the last can move to the next column, which the last row asks of all
    edges = [[column in (row, row + 1) for column in range(size)] for row in range(size - 1)]
    assert single_step._matched([*edges, [column == 0 for column in range(size)]]) == size
    assert single_step._matched([*edges, [False] * size]) == size - 1


@pytest.mark.parametrize("last", [1, 2])
def test_arguments_may_be_nested_as_deep_as_json_is_read(last: int) -> None:
    depth = 450
    texts = ['{"a": ' + '[{"b": ' * depth + str(end) + "}]" * depth + "}" for end in (1, last)]
    task = parse_task({"expected_action": {"type": "function_call", "name": "f", "arguments": texts[0]}}, Settings())
    verdict = score({"output": [function_call_item("f", texts[1], call_id="c")]}, task)
    assert verdict.reward == float(last == 1), verdict.reason


def test_a_row_of_many_calls_is_not_cheap() -> None:
    for count, is_cheap in ((single_step.CHEAP_CALLS, True), (single_step.CHEAP_CALLS + 1, False)):
        calls = (("f", "{}"),) * count
        assert single_step.VERIFIER.is_cheap(single_step.Task(calls=calls, threshold=0.1)) is is_cheap
