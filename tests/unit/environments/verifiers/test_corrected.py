"""What is kept from the reference, and the settings that correct it: each answer with both rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recipes.config.tree import build
from recipes.environments.contract.verifier import Verdict, function_call_item
from recipes.environments.instances import VERIFIERS
from recipes.environments.verifiers.code_gen import program_in
from recipes.environments.verifiers.structured_outputs import strict_schema_in_lists
from tests.office import PEOPLE, small_office

Answer = Callable[..., dict[str, Any]]
EVENT = {"event_id": 0, "start_time": "10:00", "duration": 30}
STATE = {"0": {**EVENT, "constraint": None, "min_time": "09:00", "max_time": "12:00"}}
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}
EITHER = {"anyOf": [NAMED, {"type": "string"}]}
BOARD = {
    "question": "?",
    "answer": "1 2\n3 4",
    "metadata": {"source_dataset": "rearc", "output": [[1, 2], [3, 4]]},
}
SUM = {"question": "q", "expected_answer": "8"}
BOXES = "\\boxed{7} no, \\boxed{8}"
ODD = {"type": "object", "properties": {"properties": {"type": "string"}}}

# (environment, the setting, fields of a row, an answer, its reward as in the reference, and corrected)
CASES: list[tuple[str, str, dict[str, Any], str, float, float]] = [
    ("calendar", "refuse_repeated_events", {"exp_cal_state": STATE}, json.dumps([EVENT, EVENT]), 1.0, 0.0),
    ("calendar", "refuse_repeated_events", {"exp_cal_state": STATE}, json.dumps([EVENT]), 1.0, 1.0),
    ("instruction_following", "refuse_empty_answers", NO_COMMA, " \n", 1.0, 0.0),
    ("instruction_following", "refuse_empty_answers", NO_COMMA, "!", 1.0, 0.0),
    ("instruction_following", "refuse_empty_answers", NO_COMMA, "... \n--- \u2026 \u200b", 1.0, 0.0),
    ("instruction_following", "refuse_empty_answers", NO_COMMA, "yes", 1.0, 1.0),
    ("instruction_following", "refuse_empty_answers", NO_COMMA, "5!", 1.0, 1.0),
    ("instruction_following", "refuse_empty_answers", NO_COMMA, "\u662f\u3002", 1.0, 1.0),
    ("structured_outputs", "strict_inside_lists", {"schema_str": json.dumps(EITHER)}, '{"age": 3}', 1.0, 0.0),
    ("structured_outputs", "strict_inside_lists", {"schema_str": json.dumps(EITHER)}, '{"name": "Ann"}', 1.0, 1.0),
    ("structured_outputs", "strict_inside_lists", {"schema_str": json.dumps(ODD)}, '{"properties": "x"}', 0.0, 1.0),
    ("math_with_judge", "last_box_only", SUM, BOXES, 0.0, 1.0),
    ("math_with_judge", "last_box_only", {**SUM, "expected_answer": "7"}, BOXES, 0.0, 0.0),
    ("math_with_judge", "last_box_only", SUM, "The answer is 8.", 1.0, 1.0),
    ("ns_tools", "last_box_only", SUM, BOXES, 0.0, 1.0),
    ("reasoning_gym", "compare_boards", BOARD, "<answer>1 2\n3 4</answer>", 0.05, 1.0),
    ("reasoning_gym", "compare_boards", BOARD, "<answer>1 2\n3 5</answer>", 0.05, 0.05),
]


def rewards(name: str, setting: str, row: dict[str, Any], response: dict[str, Any], **settings: Any) -> list[float]:
    verifier, found = VERIFIERS[name], []
    for is_on in (False, True):
        given = {**settings, setting: is_on}
        given = {"scores_as": given} if name == "ns_tools" else given
        verdict = verifier.score(response, verifier.parse_task(row, build(verifier.settings, given)))
        assert isinstance(verdict, Verdict)
        found.append(verdict.reward)
    return found


@pytest.mark.parametrize(("name", "setting", "row", "text", "kept", "corrected"), CASES)
def test_a_setting_corrects_what_is_kept(
    name: str, setting: str, row: dict[str, Any], text: str, kept: float, corrected: float, answer: Answer
) -> None:
    assert rewards(name, setting, row, answer(text)) == [kept, corrected]


@pytest.mark.parametrize(
    ("expected", "found", "kept", "corrected"),
    [
        ("1.0", "1", 0.0, 1.0),
        ("1", "1.0", 0.0, 1.0),
        ("[1.0]", "[1]", 0.0, 1.0),
        ("1", "true", 1.0, 0.0),
        ("true", "1", 0.0, 0.0),
        ("2", "1", 0.0, 0.0),
        ("1.5", "1" + "0" * 400, 0.0, 0.0),
        ('"1"', "1", 0.0, 0.0),
        ("null", "null", 1.0, 1.0),
    ],
)
def test_numbers_by_value(expected: str, found: str, kept: float, corrected: float) -> None:
    verifier = VERIFIERS["single_step_tool_use_with_argument_comparison"]
    row = {"expected_action": {"type": "function_call", "name": "f", "arguments": f'{{"a": {expected}}}'}}
    response = {"output": [function_call_item("f", f'{{"a": {found}}}', call_id="c")]}
    for is_on, reward in ((False, kept), (True, corrected)):
        config = {"word_count_similarity_threshold": 0.1, "compare_numbers_by_value": is_on}
        settings = build(verifier.settings, {"tool_call_comparator_config": config})
        assert verifier.score(response, verifier.parse_task(row, settings)).reward == reward  # type: ignore[union-attr]


def test_the_order_of_an_office() -> None:
    send = ("email_send_email", {"recipient": PEOPLE[0], "subject": "Hi", "body": "there"})
    delete = ("email_delete_email", {"email_id": "00000001"})
    truth = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in (send, delete)]
    for calls, expected in (([send, delete], [1.0, 1.0]), ([delete, send], [0.0, 1.0]), ([delete], [0.0, 0.0])):
        items = [function_call_item(name, json.dumps(arguments), call_id="c") for name, arguments in calls]
        row, response = {"ground_truth": truth}, {"output": items}
        assert rewards("workplace_assistant", "ignore_order", row, response, tables=small_office()) == expected


def test_a_fence_that_is_not_closed() -> None:
    closed, opened = "```\na\n```\nso\n```\nb\n```", "```\na\n```\nso\n```\nb"
    assert (program_in(closed), program_in(closed, closes_fence=True)) == ("b", "b")
    assert (program_in(opened), program_in(opened, closes_fence=True)) == ("so", "b")
    assert (program_in("```\na"), program_in("```\na", closes_fence=True)) == (None, "a")
    assert program_in("a", closes_fence=True) is None and program_in("```", closes_fence=True) is None


def test_a_stricter_schema_is_not_made_where_it_would_allow_more_or_nothing() -> None:
    schema = {"not": NAMED, "if": NAMED, "allOf": [NAMED, NAMED], "items": NAMED, "enum": [{"properties": {}}]}
    strict = strict_schema_in_lists(schema)
    assert {key for key in schema if strict[key] != schema[key]} == {"items"}
    assert strict["items"] == {**NAMED, "required": ["name"], "additionalProperties": False}
    assert strict_schema_in_lists(True) is True and strict_schema_in_lists({"properties": 3}) == {"properties": 3}
