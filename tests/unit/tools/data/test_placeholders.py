"""Restoring questions and answers: the recorded reference outputs, and the decided differences."""

from __future__ import annotations

import json

import pytest

from tests.recorded import golden, skip_where_missing
from tools.data.placeholders import dapo_prompt, nested, restore_answer, restore_row, skywork_prompt


def cases(kind: str) -> list[dict]:
    """Return the recorded cases of a kind; skips where another directory has none."""
    found = [case for case in golden("env/placeholders.json").get("cases", []) if case["kind"] == kind]
    skip_where_missing(found, f"{kind} case in placeholders")
    return found


def test_dapo_prompts_match_the_reference() -> None:
    for case in cases("dapo"):
        assert dapo_prompt(case["hf_question"], case["template"]) == case["result"]


def test_skywork_prompts_match_the_reference() -> None:
    for case in cases("skywork"):
        assert skywork_prompt(case["hf_question"], case["template"]) == case["result"]


def test_nested_values_match_the_reference() -> None:
    for case in cases("nested"):
        assert nested(case["record"], case["path"]) == case["result"]


def test_answers_match_the_reference_as_text() -> None:
    for case in cases("answer"):
        answer, reference = restore_answer(case["raw"]), case["result"]
        if isinstance(reference, str) or case["raw"] is None:
            assert answer == reference
        elif reference == [] or reference == {}:  # no first value: the text stays
            assert answer == case["raw"]
        else:  # the reference makes a number or null of the text, which the verifier refuses
            assert isinstance(answer, str)
            assert json.loads(answer) == reference


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        ("42", "42"),
        ("-3.50", "-3.50"),
        ("007", "007"),
        ("true", "true"),
        ("[1.50]", "1.50"),
        ('["\\\\frac{1}{2}", "0.5"]', "\\frac{1}{2}"),
        ('{"a": 7}', "7"),
        ("[[1, 2.50]]", "[1, 2.5]"),
        ('[null, "4"]', "null"),
        ("NaN", "NaN"),
        (42, "42"),
    ],
)
def test_answers_stay_text(raw: object, answer: str) -> None:
    assert restore_answer(raw) == answer


def test_a_template_of_the_wrong_kind_leaves_the_question() -> None:
    assert dapo_prompt("a\n\nb\n\nc", None) == "a\n\nb\n\nc"
    assert skywork_prompt("q", {"prefix": "x"}) == "q"
    assert skywork_prompt("q", "no slot") == "q"


def test_a_question_with_braces_is_put_in_as_it_is() -> None:
    assert skywork_prompt("{x} {question}", "S: {question}") == "S: {x} {question}"


def test_restored_rows_keep_their_other_fields() -> None:
    row = {
        "dataset": "d",
        "agent_ref": {"name": "a"},
        "_hf_placeholder": {"row": 0, "question_template": "T: {question}"},
    }
    dapo = row | {"_hf_placeholder": {"row": 0, "question_template": {"prefix": "<", "suffix": ">"}}}
    request = {"input": [{"role": "user", "content": "T: q"}]}
    common = {"dataset": "d", "agent_ref": {"name": "a"}, "expected_answer": "4"}
    assert restore_row(row, style="skywork", question="q", answer="4") == common | {
        "question": "q",
        "responses_create_params": request,
    }
    assert restore_row(dapo, style="dapo", question="1\n\nq\n\n2", answer="4")["question"] == "<q>"
