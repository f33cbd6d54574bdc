"""Instructions that a program can check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.verifiers.checks.instructions import CHECKS, LANGUAGES, language_of, sentences_of
from recipes.environments.verifiers.instruction_following import VERIFIER, Settings, parse_task, score, unanswerable

Answer = Callable[..., dict[str, Any]]


def row(*instructions: tuple[str, dict[str, Any] | None], mode: str | None = None) -> dict[str, Any]:
    names, arguments = [name for name, _ in instructions], [given for _, given in instructions]
    return {"verifier_metadata": {"instruction_id_list": names, "kwargs": arguments, "grading_mode": mode}}


# (instruction, its arguments, an answer that follows it, one that does not); what no recorded case covers
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "One. Dr. No is two!",
        "One.",
    ),
    ("count:count_unique", {}, "all words differ", "the cat the dog"),
    ("count:counting_composition", {"n_sent": 1, "n_words": 3}, "Go on.\n***\nI am.\n***\nWe do.", "Go.\n***\nI am."),
    (
        "keywords:keyword_specific_position",
        {"keyword": "cat", "n": 2, "m": 3},
        "Hi. The big cat? No: the",
        "The big cat.",
    ),
    ("keywords:start_end", {}, "Yes and yes", "Yes and no"),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "A dog",
        "A NEW DOG",
    ),
    ("copy:repeat_phrase", {"phrase": "go to the sea", "small_n": 1}, "go to a sea", "go to the sea"),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, " BC ", "abc"),
    ("detectable_format:bigram_wrapping", {}, "<<a b>> <<c d>>", "<<a b"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "no"),
    ("keywords:existence", {"keywords": ["a+b", "c"]}, "aab C", "ab"),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist nicht der Hund, und die Katze auch nicht.",
        "This is the dog.",
    ),
    ("paragraphs:paragraphs2", {}, "a\n\nb", "a"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_checks(answer: Answer, name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    task = parse_task(row((name, arguments)), Settings())
    assert [score(answer(text), task).reward for text in (good, bad)] == [1.0, 0.0]


def test_modes_and_reasons(answer: Answer) -> None:
    both = (("punctuation:no_comma", None), ("detectable_format:title", {}))
    assert score(answer("x"), parse_task(row(*both), Settings())).reward == 0.0
    verdict = score(answer("x"), parse_task(row(*both, mode="fraction"), Settings()))
    assert (verdict.reward, verdict.reason) == (0.5, "not followed: detectable_format:title")


@pytest.mark.parametrize("arguments", [{}, {"keyword": None}, {"other": 1}, {"keyword": "("}])
def test_arguments_that_do_not_fit_are_not_followed(answer: Answer, arguments: dict[str, Any]) -> None:
    assert score(answer("x"), parse_task(row(("keywords:word_once", arguments)), Settings())).reward == 0.0


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("text", ["", " ", "*" * 20_000, "<<" * 10_000, "[" * 20_000, "a" * 20_000])
def test_no_check_fails_on_odd_text(answer: Answer, name: str, text: str) -> None:
    verdict = score(answer(text), parse_task(row((name, {})), Settings()))
    assert verdict.reward in (0.0, 1.0)
    assert verdict.reason


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("This is the weather of today and it is cold", "en"),
        ("Le chat est dans la maison et il ne dort pas", "fr"),
        ("El perro no es para los que viven en la casa", "es"),
        ("\u042d\u0442\u043e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u044f\u0437\u044b\u043a", "ru"),
        ("\u3053\u308c\u306f\u65e5\u672c\u8a9e\u3067\u3059", "ja"),
        ("\u8fd9\u662f\u4e2d\u6587", "zh-cn"),
        ("12 34", None),
    ],
)
def test_languages(text: str, language: str | None) -> None:
    assert language_of(text) == language


def test_sentences() -> None:
    assert sentences_of('Mr. A. B. Smith paid 3.50 dollars. "Why?" he said! And I') == [
        "Mr. A. B. Smith paid 3.50 dollars.",
        '"Why?"',
        "he said!",
        "And I",
    ]


def test_real_rows(gym_row: Callable[..., dict[str, Any]], answer: Answer) -> None:
    for index in range(5):
        task = parse_task(gym_row("instruction_following", index), Settings())
        assert {name for name, _ in task.instructions} <= CHECKS.keys()
        assert score(answer("one, two"), task).reward == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"instruction_id_list": "x"}, "field 'instruction_id_list': got string 'x', expected a list of strings"),
        ({"kwargs": [1]}, "field 'kwargs': got list"),
        ({"grading_mode": "mean"}, "field 'grading_mode': got string 'mean', expected one of binary, fraction"),
    ],
)
def test_bad_row(fields: dict[str, Any], message: str) -> None:
    good = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [None]}
    with pytest.raises(ValueError, match="^" + message):
        parse_task({**good, **fields}, Settings())


NEVER_TOLD = [
    "af",
    "ca",
    "cs",
    "cy",
    "da",
    "et",
    "hr",
    "hu",
    "id",
    "lt",
    "lv",
    "mk",
    "no",
    "ro",
    "sk",
    "sl",
    "so",
    "sq",
    "tl",
    "zh-tw",
]
TOLD = "ar bg bn de el en es fa fi fr gu he hi it ja kn ko ml mr ne nl pa pl pt ru sv sw ta te th tr uk ur vi zh-cn"


@pytest.mark.parametrize("language", [*NEVER_TOLD, "xx", "EN", "", 3, ["en"], {"en": 1}])
def test_a_language_that_is_never_told_is_refused_when_its_row_is_read(language: Any) -> None:
    row = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": language}]}
    with pytest.raises(ValueError, match=r"field 'kwargs\.0\.language': got .* expected one of ar, bg, bn"):
        parse_task(row, Settings())


def test_every_other_language_is_told() -> None:
    assert set(TOLD.split()) == LANGUAGES
    for language in TOLD.split():
        parse_task(
            {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": language}]}, Settings()
        )


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("punctuation:no_comma", {}, None),
        ("first_word:first_word_sent", {"first_word": "a"}, None),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, None),
        ("punctuation:no_commas", {}, "is unknown"),
        ("punctuation:no_comma", {"num": 3}, "unexpected keyword argument 'num'"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2}, "missing 1 required positional argument: 'relation'"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "more"}, "unknown relation 'more'"),
        ("keywords:frequency", {"keyword": "(a", "frequency": 2, "relation": "at least"}, "missing ), unterminated"),
        ("length_constraints:number_words", {"num_words": "5", "relation": "at least"}, "not supported between"),
    ],
)
def test_an_instruction_that_no_answer_follows_is_named(name: str, arguments: Any, problem: str | None) -> None:
    row = {"instruction_id_list": ["punctuation:no_comma", name], "kwargs": [{}, arguments]}
    found = unanswerable(parse_task(row, Settings()))
    assert found is None if problem is None else found and problem in found and found.startswith("field 'kwargs.1'")


def test_a_share_can_be_earned_unless_no_instruction_can_be_followed() -> None:
    good, bad = ("punctuation:no_comma", {}), ("no:such", {})
    for mode, instructions, is_possible in (
        ("fraction", (bad, good), True),
        ("fraction", (bad, bad), False),
        ("binary", (bad, good), False),
    ):
        assert (unanswerable(parse_task(row(*instructions, mode=mode), Settings())) is None) == is_possible


@pytest.mark.parametrize(
    ("instructions", "is_exempt"),
    [
        ({}, True),
        ({"punctuation:no_comma": {}}, True),
        ({"length_constraints:number_words": {"num_words": 50, "relation": "less than"}}, True),
        ({"length_constraints:number_words": {"num_words": 50, "relation": "at least"}}, False),
        ({"punctuation:no_comma": {}, "keywords:existence": {"keywords": ["x"]}}, False),
        ({"startend:end_checker": {"end_phrase": "the end"}}, False),
    ],
)
def test_any_text_is_right_only_where_instructions_forbid(
    instructions: dict[str, dict[str, Any]], is_exempt: bool
) -> None:
    row = {"instruction_id_list": [*instructions], "kwargs": [*instructions.values()]}
    assert ("any text" in VERIFIER.exempt(parse_task(row, Settings()))) is is_exempt
