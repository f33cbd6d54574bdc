"""Procedural tasks, scored by the library's own scorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.verifiers import reasoning_gym
from recipes.environments.verifiers.reasoning_gym import Settings, extract_answer, parse_task, score

Answer = Callable[..., dict[str, Any]]
ROW = {"question": "60 + 93 - 16 + 19 =", "answer": "156", "metadata": {"source_dataset": "chain_sum"}}


def test_correct_wrong_and_partial(answer: Answer) -> None:
    task = parse_task(ROW, Settings())
    assert score(answer("<answer>156</answer>"), task).reward == 1.0
    assert score(answer("<answer>157</answer>"), task).reward == 0.0
    partial = score(answer("<answer>156 or so</answer>"), task)
    assert partial.reward == pytest.approx(len("156") / len("156 or so"))
    assert partial.reason == "chain_sum: '156 or so' scored 0.333"


def test_empty(answer: Answer) -> None:
    assert score(answer(""), parse_task(ROW, Settings())).reward == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("\\boxed{1} and \\boxed{2}", "1"),
        ("\\boxed{1} <answer>2</answer>", "2"),
        ("<answer>1", "<answer>1"),  # never closed
        ("\\boxed{1", "\\boxed{1"),
        ("  12 \n", "12"),
    ],
)
def test_extraction(text: str, expected: str) -> None:
    assert extract_answer(text) == expected


def test_malformed_answer_of_a_structured_task(answer: Answer) -> None:
    row = {
        "question": "Make 24",
        "answer": "4 * 6",
        "metadata": {"source_dataset": "countdown", "numbers": [4, 6], "target": 24},
    }
    assert score(answer("<answer>4 * </answer>"), parse_task(row, Settings())).reward < 0.1


def test_listing_many_answers_earns_next_to_nothing(answer: Answer) -> None:
    many = " ".join(str(n) for n in range(1000))
    assert score(answer(f"<answer>{many}</answer>"), parse_task(ROW, Settings())).reward < 0.01


@pytest.mark.parametrize("word", ["detrevnoc", "ssenippahnu"])
def test_parts_add_up_to_no_more_than_one(word: str, answer: Answer) -> None:
    row = {"question": "?", "answer": word, "metadata": {"source_dataset": "spell_backward"}}
    assert score(answer(f"<answer>{word}</answer>"), parse_task(row, Settings())).reward == 1.0
    assert score(answer(f"<answer>{word}.</answer>"), parse_task(row, Settings())).reward < 1.0, "a character too many"


def test_an_unknown_task_has_a_reason(answer: Answer) -> None:
    verdict = score(answer("1"), parse_task(ROW | {"metadata": {"source_dataset": "nope"}}, Settings()))
    assert (verdict.reward, verdict.reason) == (0.0, "nope: the library has no such task")


def test_a_broken_installation_gives_no_verdict(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_name: str) -> None:
        raise FileNotFoundError("words.txt")

    monkeypatch.setattr(reasoning_gym, "_scorer", broken)
    with pytest.raises(FileNotFoundError, match=r"words\.txt"):
        score(answer("<answer>156</answer>"), parse_task(ROW, Settings()))


def test_text_that_the_scorer_cannot_read_earns_nothing(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    def scorer(_answer: str, _entry: dict[str, Any]) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(reasoning_gym, "_scorer", lambda _name: scorer)
    verdict = score(answer("1"), parse_task(ROW, Settings()))
    assert (verdict.reward, verdict.reason) == (0.0, "chain_sum: the scorer failed: ZeroDivisionError: ")


def test_real_row(gym_row: Callable[..., dict[str, Any]], answer: Answer) -> None:
    row = gym_row("reasoning_gym")
    task = parse_task(row, Settings())
    assert score(answer(f"I think <answer>{row['answer']}</answer>"), task).reward == 1.0
    assert score(answer("<answer>Zoey is a sage, and Riley is a fool.</answer>"), task).reward == 0.0


MAKE_24 = ("puzzle24", "8*(6 - 3)*1", {"numbers": [1, 3, 6, 8]})
MAKE_179 = ("countdown", "2*73 + 33", {"numbers": [2, 33, 73], "target": 179})
HALTING = ("game_of_life_halting", "False", {})
COIN = ("coin_flip", "0.0009765625", {})
COMPLEX = ("complex_arithmetic", "3.0 + 4.0i", {"result": [3.0, 4.0]})
PREMISES = ("propositional_logic", "", {"premises": ["(P \u2227 R)", "Q"], "variables": ["P", "Q", "R"]})
SORTED = ("number_sorting", "['-3.5', '2.0', '9.25']", {"direction": "ascending"})
LIFE = ("game_of_life", "[[0, 1], [1, 0]]", {})
WORDS = ("word_sorting", "ant, bee", {"sorted_words": ["ant", "bee"]})
# (family, its answer, its metadata) -> texts that are right, texts that are not
PAID: list[tuple[tuple[str, str, dict[str, Any]], list[str], list[str]]] = [
    (
        MAKE_24,
        ["8*(6-3)*1", "8 * (6 - 3) / 1", "-(3-6)*8*1", "(6-3)*(8)*1"],
        [
            "6*(1+1+2)",
            "6*4*1*1",
            "49/2",
            "24",
            "8*(6-3)",
            "8*(6-3)*1*1",
            "0x8*(6-3)*1",
            "8*(6-3)*1e0",
            "8*(6-3)*0_1",
            "8*(6-3)*0b1",
            "\u0668*(6-3)*1",
            "8*(6-3)**1",
            "8*(6-3)//1",
            "8*(6-3)*1.0",
            "sqrt(576)",
            "8*(6-3)*1 = 24",
            "1/(3-3)",
            "8*(6-3)*True",
            "1*3*6*8",
            "(" * 9000 + "1" + ")" * 9000,
            "-" * 9000 + "1",
            "8*(6-3)*1+x-x",
            "",
        ],
    ),
    (
        MAKE_179,
        ["73*2+33", "33 + 2*73"],
        [
            "0xb3+0x0*(73+33+2)",
            "179",
            "1_79+0*(2+33+73)",
            "179e0+0*(2+33+73)",
            "0b10110011*1",
            "73*2+33*1",
            "73+73+33",
            "0o263+0*(2*33*73)",
            "2+33+73",
            "73*2+33+factorial(0)-1",
            "\u0661\u0667\u0669+0*(2+33+73)",
            "73*2+33.",
        ],
    ),
    (HALTING, ["False", "false", " FALSE "], ["True", "0", "I do not know", "no", "False True", "a", "[]", "="]),
    ((*HALTING[:1], "True", {}), ["True"], ["False", "", "yes", "1", "True or False"]),
    (
        COIN,
        ["0.0009765625", "1/1024", "9.77e-4", ".000977", "0.000977"],
        [
            "0",
            "0.",
            "0.0",
            "0.5",
            "0.001",
            "1/1000",
            "nan",
            "inf",
            "1e999999999",
            "1/0",
            "0.0001",
            "00",
            "-0.0009765625",
        ],
    ),
    (
        COMPLEX,
        ["3+4i", "(3.0 + 4.0i)", "3 + 4j", "3e0+4i"],
        ["nan", "NaN", "nan+0i", "3+nani", "inf", "1e999", "0", "4+3i"],
    ),
    (
        PREMISES,
        ["(P \u2227 Q) \u2228 R", "(P \u2194 R)", "(P \u2192 Q)"],
        [
            "(P \u2227 R)",
            "(R \u2227 P)",
            "Q",
            "((P \u2227 R) \u2227 Q)",
            "\u00ac\u00ac(P \u2227 R)",
            "(Q \u2228 Q)",
            "P \u2228 \u00acP",
        ],
    ),
    (
        SORTED,
        ['["-3.5", "2.0", "9.25"]', "[-3.5, 2, 9.25]"],
        ["[-3, 2, 9]", "[-3.5, 2.0]", "[]", "[-3.5, 2.9, 9.25]", "9"],
    ),
    (LIFE, ["[[0,1],[1,0]]"], ["[[0,1],[1,0],[1]]", "[[0,1,1],[1,0]]", "[[0,0],[0,0]]", "[]", "{}"]),
    (WORDS, ["ant, bee", "ant,bee"], ["ant, bee, cow", "ant, bee, ant, bee", "bee, ant", "ant"]),
    (("letter_jumble", "one two", {}), ["one two", "One Two"], ["one two three", "one two one two", "two one"]),
    (("ab", "", {}), [""], ["B#", "\u200b"]),
]


@pytest.mark.parametrize(("family", "right", "not_right"), PAID, ids=[family[0] for family, _, _ in PAID])
def test_what_is_not_right_is_not_paid(
    family: tuple[str, str, dict[str, Any]], right: list[str], not_right: list[str], answer: Answer
) -> None:
    name, gold, metadata = family
    task = parse_task({"question": "?", "answer": gold, "metadata": {"source_dataset": name, **metadata}}, Settings())
    rewards = {text: score(answer(f"<answer>{text}</answer>"), task).reward for text in [*right, *not_right]}
    assert [text for text in right if rewards[text] < 1.0] == []
    assert [text for text in not_right if rewards[text] >= 1.0] == []
    assert score(answer(""), task).reward == score({"output": []}, task).reward == 0.0


def test_a_family_without_a_scorer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"metadata\.source_dataset.*composite.*made of other families"):
        parse_task(ROW | {"metadata": {"source_dataset": "composite"}}, Settings())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metadata": None}, "field 'metadata': got nothing, expected an object"),
        ({"metadata": {}}, "field 'metadata.source_dataset': got nothing, expected the name"),
        ({"question": 1}, "field 'question': got number 1"),
        ({"answer": 156}, "field 'answer': got number 156, expected a string or null"),
    ],
)
def test_bad_row(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        parse_task(ROW | fields, Settings())
