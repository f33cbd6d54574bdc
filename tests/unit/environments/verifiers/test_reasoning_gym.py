"""Procedural tasks, scored by the library's own scorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.verifiers import reasoning_gym
from recipes.environments.verifiers.reasoning_gym import extract_answer, parse_task, score

Answer = Callable[..., dict[str, Any]]
ROW = {"question": "60 + 93 - 16 + 19 =", "answer": "156", "metadata": {"source_dataset": "chain_sum"}}


def test_correct_wrong_and_partial(answer: Answer) -> None:
    task = parse_task(ROW, {})
    assert score(answer("<answer>156</answer>"), task).reward == 1.0
    assert score(answer("<answer>157</answer>"), task).reward == 0.0
    partial = score(answer("<answer>156 or so</answer>"), task)
    assert partial.reward == pytest.approx(len("156") / len("156 or so"))
    assert partial.reason == "chain_sum: '156 or so' scored 0.333"


def test_empty(answer: Answer) -> None:
    assert score(answer(""), parse_task(ROW, {})).reward == 0.0


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
    assert score(answer("<answer>4 * </answer>"), parse_task(row, {})).reward < 0.1


def test_listing_many_answers_earns_next_to_nothing(answer: Answer) -> None:
    many = " ".join(str(n) for n in range(1000))
    assert score(answer(f"<answer>{many}</answer>"), parse_task(ROW, {})).reward < 0.01


@pytest.mark.parametrize("word", ["detrevnoc", "ssenippahnu"])
def test_parts_add_up_to_no_more_than_one(word: str, answer: Answer) -> None:
    row = {"question": "?", "answer": word, "metadata": {"source_dataset": "spell_backward"}}
    assert score(answer(f"<answer>{word}.</answer>"), parse_task(row, {})).reward == 1.0


def test_an_unknown_task_has_a_reason(answer: Answer) -> None:
    verdict = score(answer("1"), parse_task(ROW | {"metadata": {"source_dataset": "nope"}}, {}))
    assert (verdict.reward, verdict.reason) == (0.0, "nope: the library has no such task")


def test_a_broken_installation_gives_no_verdict(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_name: str) -> None:
        raise FileNotFoundError("words.txt")

    monkeypatch.setattr(reasoning_gym, "_scorer", broken)
    with pytest.raises(FileNotFoundError, match=r"words\.txt"):
        score(answer("<answer>156</answer>"), parse_task(ROW, {}))


def test_text_that_the_scorer_cannot_read_earns_nothing(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    def scorer(_answer: str, _entry: dict[str, Any]) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(reasoning_gym, "_scorer", lambda _name: scorer)
    verdict = score(answer("1"), parse_task(ROW, {}))
    assert (verdict.reward, verdict.reason) == (0.0, "chain_sum: the scorer failed: ZeroDivisionError: ")


def test_real_row(gym_row: Callable[..., dict[str, Any]], answer: Answer) -> None:
    row = gym_row("reasoning_gym")
    task = parse_task(row, {})
    assert score(answer(f"I think <answer>{row['answer']}</answer>"), task).reward == 1.0
    assert score(answer("<answer>Zoey is a sage, and Riley is a fool.</answer>"), task).reward == 0.0


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
        parse_task(ROW | fields, {})
