"""The office: every recorded reward and tool output, the rules of equality one by one, and hostile calls."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.contract.verifier import function_call_item, message_item
from recipes.environments.instances import VERIFIERS
from recipes.environments.verifiers.office.tables import load_office
from recipes.environments.verifiers.office.tools import ARGUMENTS, MAX_CHANGES, MAX_TEXT, call
from tests.office import PEOPLE, real_office, small_office, write_small_office
from tests.recorded import env_cases

VERIFIER = VERIFIERS["workplace_assistant"]
SEND = {"recipient": PEOPLE[0], "subject": "Hi", "body": "there"}
EVENT = {
    "event_name": "Talk",
    "participant_email": PEOPLE[0],
    "event_start": "2023-12-04 09:00:00",
    "duration": "30",
}
Calls = list[tuple[str, dict[str, Any]]]


@pytest.mark.parametrize("case", env_cases("workplace_assistant"))
def test_recorded_reward(case: dict[str, Any]) -> None:
    task = VERIFIER.parse_task(case["row"], VERIFIER.settings(tables=real_office()))
    verdict = VERIFIER.score(case["response"], task)
    assert verdict.reward == case["reward"], verdict.reason


@pytest.mark.parametrize("sequence", env_cases("workplace_assistant_tool_outputs", "sequences"))
def test_recorded_tool_outputs(sequence: list[dict[str, Any]]) -> None:
    """What the model is shown. The recording has NaN for an empty cell; JSON has no NaN, so the wire has null."""
    assert VERIFIER.tools
    state = VERIFIER.tools.start(VERIFIER.settings(tables=real_office()))
    for step in sequence:
        state, text = VERIFIER.tools.call(state, step["name"], step["arguments"])
        expected = json.loads(json.dumps(step["output"]), parse_constant=lambda _: None)
        assert json.loads(text) == {"output": expected}


def reward(calls: Calls, expected: Calls) -> float:
    items = [function_call_item(name, json.dumps(arguments), call_id="c") for name, arguments in calls]
    truth = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in expected]
    task = VERIFIER.parse_task({"ground_truth": truth}, VERIFIER.settings(tables=small_office()))
    value: float = VERIFIER.score({"output": [*items, message_item("Done.")]}, task).reward
    return value


SENT, DELETED = ("email_send_email", SEND), ("email_delete_email", {"email_id": "00000001"})
MADE = ("calendar_create_event", EVENT)
ADDED: dict[str, Any] = {"customer_name": "Fay", "assigned_to_email": PEOPLE[0], "status": "Lead"}
EQUALITY: dict[str, tuple[Calls, Calls, float]] = {
    "a deletion before a new email": ([DELETED, SENT], [SENT, DELETED], 0.0),
    "a deletion before a new event": (
        [("calendar_delete_event", {"event_id": "00000000"}), MADE],
        [MADE, ("calendar_delete_event", {"event_id": "00000000"})],
        1.0,
    ),
    "the last event made again": (
        [
            ("calendar_delete_event", {"event_id": "00000001"}),
            ("calendar_delete_event", {"event_id": "00000000"}),
            MADE,
        ],
        [],
        0.0,
    ),
    "an email sent and deleted": ([SENT, ("email_delete_email", {"email_id": "3"})], [], 1.0),
    "a duration as a number": ([("calendar_create_event", {**EVENT, "duration": 30})], [MADE], 0.0),
    "two durations as numbers": (
        [("calendar_create_event", {**EVENT, "duration": 30})],
        [("calendar_create_event", {**EVENT, "duration": 45})],
        1.0,
    ),
    "case of a status": (
        [("customer_relationship_manager_add_customer", {**ADDED, "status": "lead"})],
        [("customer_relationship_manager_add_customer", ADDED)],
        0.0,
    ),
    "null notes": (
        [("customer_relationship_manager_add_customer", {**ADDED, "notes": None})],
        [("customer_relationship_manager_add_customer", ADDED)],
        0.0,
    ),
    "a null phone": (
        [("customer_relationship_manager_add_customer", {**ADDED, "customer_phone": None})],
        [("customer_relationship_manager_add_customer", ADDED)],
        1.0,
    ),
    "an unknown argument": ([("email_send_email", {**SEND, "cc": PEOPLE[1]}), SENT], [SENT], 1.0),
    "a changed id": (
        [("project_management_update_task", {"task_id": "00000000", "field": "task_id", "new_value": "x"})],
        [],
        0.0,
    ),
}


@pytest.mark.parametrize("name", EQUALITY)
def test_states_are_compared_as_decided(name: str) -> None:
    calls, expected, value = EQUALITY[name]
    assert reward(calls, expected) == value


def test_ids_are_the_greatest_text_plus_one() -> None:
    office = load_office(small_office())
    for _ in range(11):
        office, _ = call(office, "email_send_email", SEND)
    assert [email["email_id"] for email in office.emails.records[3:]] == [*"3456789", "10", "10", "10", "10"]
    office, task_id = call(
        office,
        "project_management_create_task",
        {"task_name": "t", "assigned_to_email": PEOPLE[0], "list_name": "Backlog", "due_date": "x", "board": "Design"},
    )
    assert task_id == "00000002"


def test_an_update_of_an_id_stops_new_ids_and_says_so() -> None:
    office = load_office(small_office())
    change = {"customer_id": "00000001", "field": "customer_id", "new_value": "zz"}
    office, answer = call(office, "customer_relationship_manager_update_customer", change)
    assert answer == "Customer updated successfully."
    after, answer = call(office, "customer_relationship_manager_add_customer", ADDED)
    assert after is office
    assert answer.startswith("Error executing tool 'customer_relationship_manager_add_customer': invalid literal")


def test_a_search_reads_no_regular_expressions() -> None:
    office = load_office(small_office())
    start = time.monotonic()
    for query in ("(a+)+$" * 50, "[", "ana.silva"):
        _, found = call(office, "calendar_search_events", {"query": query})
        assert found == "No events found." or query == "ana.silva"
    assert time.monotonic() - start < 5.0


WRONG: list[Any] = [
    None,
    5,
    -1,
    10**18,
    1.5,
    float("nan"),
    float("inf"),
    True,
    "",
    "x" * MAX_TEXT,
    "x" * (MAX_TEXT + 1),
]
WRONG += ["\x00", "%s{}", [], ["a"], {}, {"a": [{}]}, "9" * 5000, "2023-13-45", "-0"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_any_argument_is_answered_with_a_text(name: str) -> None:
    tools = VERIFIER.tools
    assert tools
    state = tools.start(VERIFIER.settings(tables=small_office()))
    for value in WRONG:
        for argument in ARGUMENTS[name]:
            given = {**dict.fromkeys(ARGUMENTS[name], "00000001"), argument: value}
            state, text = tools.call(state, name, given)
            assert set(json.loads(text)) == {"output"}
    state, text = tools.call(state, name, {"no_such_argument": 1})
    assert "got an unexpected argument 'no_such_argument'" in text
    state, text = tools.call(state, name, {key: ["a"] for key in ARGUMENTS[name]})
    assert "got a list, expected a text or a number" in text


def test_an_unknown_tool_is_answered_with_a_text() -> None:
    office = load_office(small_office())
    for name in ("", "email", "__class__", "x" * 10_000):
        after, answer = call(office, name, {})
        assert after is office
        assert answer.endswith("there is no such tool")
        assert len(answer) < 300


UNREADABLE = ["", "{", "[" * 100_000, '{"a": NaN}', "[]", "5", "null", '{"a": "\\ud800"}', None, {}]


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_calls_that_cannot_be_read_are_passed_over(text: Any) -> None:
    task = VERIFIER.parse_task({"ground_truth": []}, VERIFIER.settings(tables=small_office()))
    item = {"type": "function_call", "name": "email_send_email", "arguments": text}
    assert VERIFIER.score({"output": [item, {**item, "name": 5}, {"type": "function_call"}]}, task).reward == 1.0


def test_a_rollout_can_fill_neither_memory_nor_time() -> None:
    body = "x" * 1_000
    calls = [("email_send_email", {**SEND, "body": body})] * (MAX_CHANGES + 500)
    start = time.process_time()
    assert reward(calls, calls[:MAX_CHANGES]) == 1.0  # what comes after changes nothing
    assert time.process_time() - start < 5.0
    office = load_office(small_office())
    for _ in range(MAX_CHANGES + 1):
        office, answer = call(office, "email_reply_email", {"email_id": "00000001", "body": body})
    assert answer == f"Error executing tool 'email_reply_email': the office takes no more than {MAX_CHANGES} changes"


WRONG_TABLES = {
    "id,body\n1,x\n": "got columns id, body, expected email_id",
    "a\n1,2\n": "got rows of different lengths",
    "": "got rows of different lengths or none",
}


@pytest.mark.parametrize("content", WRONG_TABLES, ids=range(len(WRONG_TABLES)))
def test_tables_of_another_form_are_refused(tmp_path: Path, content: str) -> None:
    directory = write_small_office(tmp_path)
    (tmp_path / "processed" / "emails.csv").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=WRONG_TABLES[content]):
        VERIFIER.parse_task({"ground_truth": []}, VERIFIER.settings(tables=directory))


def test_a_row_without_tables_or_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"emails\.csv|email_addresses\.csv: .*`make data` brings them"):
        VERIFIER.parse_task({"ground_truth": []}, VERIFIER.settings(tables=str(tmp_path)))
    for wrong in (None, "[]", [{"name": "f"}], [5], [{"name": "f", "arguments": {}}]):
        with pytest.raises(ValueError, match="field 'ground_truth'"):
            VERIFIER.parse_task({"ground_truth": wrong}, VERIFIER.settings(tables=small_office()))
