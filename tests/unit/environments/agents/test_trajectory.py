"""What the log keeps of an agent's work is bounded, whatever the model and its tools have written."""

from __future__ import annotations

import json

from recipes.environments.agents.coding.outcome import MAX_CHARACTERS, MAX_ITEMS, MAX_PATCH, note_trajectory
from recipes.environments.contract.verifier import (
    function_call_item,
    function_call_output_item,
    message_item,
    reasoning_item,
)
from recipes.environments.swe.contract import AgentEnd, Evaluation


def test_every_kind_of_item_has_its_role_and_text() -> None:
    items = [
        {"role": "user", "content": "mend it"},
        reasoning_item(["I", "think"]),
        message_item("look"),
        function_call_item("view", '{"path": "a"}', call_id="1"),
        function_call_output_item("half a pair \ud800", call_id="1"),
    ]
    noted = note_trajectory("a__b-1", items, end=AgentEnd.TIME, patch="", evaluation=None)
    assert noted == {
        "instance": "a__b-1",
        "items": [
            {"role": "user", "text": "mend it"},
            {"role": "reasoning", "text": "I\nthink"},
            {"role": "assistant", "text": "look"},
            {"role": "call", "name": "view", "text": '{"path": "a"}'},
            {"role": "tool", "text": "half a pair \ud800"},
        ],
        "end": "timeout",
        "patch": "",
        "tests": None,
    }
    assert json.loads(json.dumps(noted)) == noted


def test_a_long_trajectory_is_cut_and_says_how_much() -> None:
    calls = [function_call_item("bash" * 1000, "x" * 9000, call_id=str(number)) for number in range(10 * MAX_ITEMS)]
    failed = Evaluation(resolved=False, reason="", failed="f" * 10**6)
    noted = note_trajectory("i" * 10**6, calls, end=AgentEnd.OTHER, patch="p" * 10**6, evaluation=failed)
    assert len(noted["items"]) == MAX_ITEMS + 1
    assert noted["items"][MAX_ITEMS // 2] == {"role": "left out", "text": f"{9 * MAX_ITEMS} items"}
    assert "[... 8900 characters ...]" in noted["items"][0]["text"]
    assert len(noted["patch"]) < MAX_PATCH + 50
    assert len(json.dumps(noted)) < 5 * MAX_CHARACTERS
