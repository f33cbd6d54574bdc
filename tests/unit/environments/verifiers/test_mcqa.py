"""Multiple-choice answers and the ways to read a letter from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.verifiers import mcqa
from recipes.environments.verifiers.mcqa import ANSWER_COLON_MARKDOWN, Settings, parse_task, score

Answer = Callable[..., dict[str, Any]]
OPTIONS = [{"A": "Paris"}, {"B": "London"}, {"C": "New York"}, {"D": "Rome"}]


def letter(text: str, answer: Answer, mode: str | None = None, **row: Any) -> str | None:
    """Return the letter that is read from a text."""
    fields = {"options": OPTIONS, "expected_answer": "B", "grading_mode": mode} | row
    return score(answer(text), parse_task(fields, Settings())).details["extracted_answer"]


def markdown(text: str, answer: Answer) -> str | None:
    fields = {"options": OPTIONS, "expected_answer": "B"}
    task = parse_task(fields, Settings(grading_mode=ANSWER_COLON_MARKDOWN))
    return score(answer(text), task).details["extracted_answer"]


def test_correct_and_wrong(answer: Answer) -> None:
    task = parse_task({"options": OPTIONS, "expected_answer": "b"}, Settings())
    right, wrong = score(answer("so \\boxed{B}"), task), score(answer("so \\boxed{C}"), task)
    assert (right.reward, right.reason) == (1.0, "answered B, expected B")
    assert (wrong.reward, wrong.reason) == (0.0, "answered C, expected B")


def test_empty(answer: Answer) -> None:
    verdict = score(answer(""), parse_task({"options": OPTIONS, "expected_answer": "B"}, Settings()))
    assert (verdict.reward, verdict.reason) == (0.0, "the answer is empty")
    assert verdict.metrics == {"no_answer": 1.0}


@pytest.mark.parametrize("text", ["\\boxed{B", "boxed{B}", "\\boxed{}", "\\boxed{Boston}", "B", "\\boxed{AB}"])
def test_malformed(text: str, answer: Answer) -> None:
    assert letter(text, answer) is None


def test_listing_all_letters_earns_nothing(answer: Answer) -> None:
    assert letter("\\boxed{A, B, C, D}", answer) is None
    assert letter("\\boxed{A} \\boxed{B} \\boxed{C} \\boxed{D}", answer) == "D"
    assert letter("\\boxed{Paris London New York Rome}", answer, "lenient_boxed") is None
    assert markdown("Answer: A or B or C or D", answer) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{\\text{C: New York}}", "C"),
        ("\\boxed{\\text{\\text{C}}}", "C"),
        ("\\boxed{{C}}", "C"),
        ("\\boxed{C - maybe}", "C"),
        ("\\boxed{c}", None),
        ("\\boxed{E}", None),
        ("\\boxed{C} then \\boxed{", None),
    ],
)
def test_strict(text: str, expected: str | None, answer: Answer) -> None:
    assert letter(text, answer, "strict_single_letter_boxed") == expected


def test_lenient_boxed_reads_one_option_text(answer: Answer) -> None:
    assert letter("\\boxed{it is  NEW  york}", answer, "lenient_boxed") == "C"
    assert letter("\\boxed{Madrid}", answer, "lenient_boxed") is None


def test_answer_colon_takes_the_first_line(answer: Answer) -> None:
    assert letter("ANSWER: c\nAnswer: B", answer, "lenient_answer_colon") == "C"
    assert letter("Answer: new  york", answer, "lenient_answer_colon") == "C"
    assert letter("Answer: C because", answer, "lenient_answer_colon") is None


def test_answer_colon_markdown(answer: Answer) -> None:
    assert markdown("__Answer__: A", answer) == "A"
    assert markdown("\\boxed{\\text{Answer: D}}", answer) == "D"
    assert markdown("Answer: B/B", answer) == "B"
    assert markdown("Answer: C\nAnswer: G", answer) == "C"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: _C_", "C"),
        ("Answer: the one called _C_", None),  # an underscore is part of a word
        ("Answer: the one called C", "C"),
        ("Answer:\nC", "C"),
        ("**Answer**:\n\nC", "C"),
        ("Answer:\n\n\nC", None),
        ("Answer: A\nAnswer:   \nC", "A"),
    ],
)
def test_where_a_markdown_answer_may_stand(text: str, expected: str | None, answer: Answer) -> None:
    assert markdown(text, answer) == expected


def test_a_row_with_a_pattern_needs_no_options(answer: Answer) -> None:
    own = {"options": None, "template_metadata": {"output_regex": "choice (\\w)"}}
    assert letter("choice b", answer, **own) == "B"
    assert letter("\\boxed{B}", answer, **own) is None  # without options no letter may be answered
    with pytest.raises(ValueError, match="field 'options': got string 'A'"):
        letter("choice b", answer, **(own | {"options": "A"}))


def test_a_pattern_reads_the_end_of_a_long_answer(answer: Answer) -> None:
    own = {
        "template_metadata": {"output_regex": r"\(\((.*?)\)\)"}
    }  # takes the square of a text's length to find nothing
    assert letter("(" * 1_000_000, answer, **own) is None
    assert letter("(" * 1_000_000 + ")) so ((c))", answer, **own) == "C"


def test_a_rows_own_pattern_comes_first(answer: Answer) -> None:
    own = {"template_metadata": {"output_regex": ["choice (", "choice (\\w+)"]}}
    assert letter("choice a, choice c \\boxed{B}", answer, **own) == "C"  # last match; the broken pattern is skipped
    assert letter("choice Rome", answer, **own) == "D"
    assert letter("\\boxed{B}", answer, **own) == "B"  # no match: the mode decides
    arabic = {"template_metadata": {"output_regex": "choice (.)"}}
    assert letter("choice \u062c", answer, **arabic) == "C"


def test_pattern_with_alternatives_uses_the_group_that_matched(answer: Answer) -> None:
    """The reference raised here, which lost the rollout."""
    own = {"template_metadata": {"output_regex": "choice (\\w)|pick (\\w)"}}
    assert letter("pick d", answer, **own) == "D"


def test_real_rows(gym_row: Callable[..., dict[str, Any]], answer: Answer) -> None:
    task = parse_task(gym_row("mcqa"), Settings())
    assert len(task.letters) == 10
    assert score(answer("\\boxed{B}"), task).reward == 1.0
    templated = parse_task(gym_row("mcqa__example_with_template_metadata"), Settings())
    assert templated.patterns
    assert score(answer("Answer: \\boxed{{B}}"), templated).reward == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": None}, "field 'options': got nothing, expected a list"),
        ({"options": ["A"]}, "field 'options': got list"),
        ({"grading_mode": "loose"}, "field 'grading_mode': got string 'loose', expected one of lenient_answer_colon,"),
        ({"grading_mode": ANSWER_COLON_MARKDOWN}, "field 'grading_mode'"),  # for whole servers only
        ({"expected_answer": 2}, "field 'expected_answer': got number 2"),
        ({"template_metadata": {"output_regex": 1}}, "field 'template_metadata.output_regex': got number 1"),
    ],
)
def test_bad_row(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        parse_task({"options": OPTIONS, "expected_answer": "B"} | fields, Settings())


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\text{C}", "C"),
        ("  \\text{   two  words   }  ", "two  words"),
        ("\\text{ \\text{  C  } }", "C"),
        ("\\text{}", ""),
        ("\\text{    }", ""),
        ("\\text{", "\\text{"),
        ("\\text{C", "\\text{C"),
        ("C}", "C}"),
    ],
)
def test_wrappers_are_taken_off_however_deep(text: str, inside: str) -> None:
    assert mcqa._without_wrappers(text) == inside


def test_two_letters_are_a_list_when_nothing_else_stands_between_them(answer: Answer) -> None:
    found = {between: markdown(f"Answer: A{between}B", answer) for between in (" ", ", ", "; ", " or ", " - ", " is ")}
    assert found == {" ": None, ", ": None, "; ": None, " or ": None, " - ": "A", " is ": "A"}
    assert markdown("Answer: `c`", answer) == "C"
    assert letter("Answer: x", answer, "lenient_answer_colon") is None


def test_only_single_letters_are_options_and_a_row_may_lack_the_answer(answer: Answer) -> None:
    task = parse_task({"options": [{"A": "x", "AB": "y", "?": "z", "c": "w", "D": None}]}, Settings())
    assert task.options == (("A", "x"), ("C", "w")) and task.answer == ""
    assert score(answer("\\boxed{A}"), task).reason == "answered A, expected nothing"


def test_a_pattern_whose_groups_all_stayed_empty_leaves_the_answer_to_the_mode(answer: Answer) -> None:
    own = {"template_metadata": {"output_regex": "(x)?(y)?$"}}
    assert letter("\\boxed{B}", answer, **own) == "B"
    assert mcqa.is_cheap(parse_task({"options": OPTIONS}, Settings()))
    assert not mcqa.is_cheap(parse_task({"options": OPTIONS, **own}, Settings()))


@pytest.mark.parametrize(
    ("row", "got"),
    [
        (
            {"template_metadata": {"output_regex": [1]}},
            "output_regex': got list [1], expected a string or a",
        ),
        ({"grading_mode": ANSWER_COLON_MARKDOWN}, "'grading_mode': got string 'lenient_answer_colon_md', expected"),
        ({"grading_mode": "loose"}, "'grading_mode': got string 'loose', expected one of"),
    ],
)
def test_wrong_rows_are_named(row: dict[str, Any], got: str) -> None:
    with pytest.raises(ValueError, match=re.escape(got)):
        parse_task({"options": OPTIONS, **row}, Settings())


def test_a_row_without_options_needs_a_pattern_that_can_be_read() -> None:
    row = {"expected_answer": "A", "template_metadata": {"output_regex": ["(", r"is (\w)"]}}
    assert parse_task(row, Settings()).options == ()
    for pattern in ("(", "a{99999999999}", "(" * 5000 + ")" * 5000):
        with pytest.raises(ValueError, match="field 'options': got nothing, expected a list"):
            parse_task({**row, "template_metadata": {"output_regex": pattern}}, Settings())
