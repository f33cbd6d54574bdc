"""Symbolic comparison with a known answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.contract.asking import advance
from recipes.environments.verifiers import math_with_judge
from recipes.environments.verifiers.math_with_judge import MAX_CHARS, Task, boxed_gold, parse_task, score

Answer = Callable[..., dict[str, Any]]
ROW = {"question": "What is 3/4 + 1/4?", "expected_answer": "1"}


def test_correct_in_another_form(answer: Answer) -> None:
    verdict = score(answer("It is \\boxed{\\frac{2}{2}}."), parse_task(ROW, {}))
    assert verdict.reward == 1.0
    assert verdict.reason == "1 equals 1"
    assert verdict.metrics == {"library_reward": 1.0}


def test_wrong(answer: Answer) -> None:
    verdict = score(answer("\\boxed{2}"), parse_task(ROW, {}))
    assert (verdict.reward, verdict.reason) == (0.0, "2 differs from 1")


def test_empty(answer: Answer) -> None:
    assert score(answer(" \n"), parse_task(ROW, {})).reason == "the answer is empty"
    assert score({"output": []}, parse_task(ROW, {})).reward == 0.0


def test_malformed_answer(answer: Answer) -> None:
    verdict = score(answer("\\boxed{\\frac{1"), Task(expected_answer="\\frac{1}{2}"))
    assert (verdict.reward, verdict.details["extracted_answer"]) == (0.0, None)


def test_naming_every_answer_earns_nothing(answer: Answer) -> None:
    boxes = " ".join(f"\\boxed{{{n}}}" for n in range(10))
    assert score(answer(boxes), Task(expected_answer="7")).reward == 0.0


def test_unreadable_gold_is_no_reward_and_says_so(answer: Answer) -> None:
    verdict = score(answer("\\boxed{5}"), Task(expected_answer=""))
    assert verdict.reward == 0.0
    assert "cannot be read" in verdict.reason


def test_real_row(gym_row: Callable[..., dict[str, Any]], answer: Answer) -> None:
    task = parse_task(gym_row("math_with_judge"), {})
    assert task.expected_answer == "32"
    assert score(answer("... so there are $4 \\cdot 8 = 32$ of them: \\boxed{32}"), task).reward == 1.0
    assert score(answer("\\boxed{23}"), task).reward == 0.0


def test_one_pair_of_delimiters_is_removed() -> None:
    assert boxed_gold(" \\( $x$ \\) ") == "\\boxed{x}"
    assert boxed_gold("$") == "\\boxed{$}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "field 'expected_answer': got nothing, expected a string"),
        ({"question": "q", "expected_answer": 42}, "field 'expected_answer': got number 42, expected a string"),
        ({"expected_answer": "42"}, "field 'question': got nothing, expected a string"),
    ],
)
def test_bad_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        parse_task(row, {})


def test_of_a_very_long_answer_the_end_counts(answer: Answer) -> None:
    """Of two boxes in one answer neither counts, so the first one is out of sight here."""
    long = answer("\\boxed{7} " + "so " * (MAX_CHARS // 3) + "\\boxed{8}")
    assert score(long, Task(expected_answer="8")).reward == 1.0  # type: ignore[union-attr]


def test_the_judges_replies_do_not_repeat_the_symbolic_check(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps a score between two replies, so it begins anew; sums of a megabyte take seconds to read."""
    math_with_judge._checked.cache_clear()
    compared, real = [], math_with_judge._compare
    monkeypatch.setattr(math_with_judge, "_compare", lambda *given: compared.append(given) or real(*given))
    task = Task(expected_answer="8", question="q", asks_judge=True)
    reply = {"output": [{"type": "message", "content": [{"type": "output_text", "text": "[[A=B]]"}]}]}
    for replies in ((), ((reply,),), ((reply,), (reply,))):
        scored = advance(score(answer("1+" * 1000), task), replies)
    assert scored.reward == 1.0 and len(compared) == 1  # type: ignore[union-attr]


def test_refuses_to_run_without_its_time_limit(answer: Answer) -> None:
    """SIGALRM works in the main thread only; elsewhere the library would answer 0 for everything."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            score(answer("\\boxed{1}"), parse_task(ROW, {}))
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
