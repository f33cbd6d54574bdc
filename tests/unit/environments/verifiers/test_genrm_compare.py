"""A group compared in pairs: who gets which score, and that a comparison that fails is never a number."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from recipes.environments.contract.verifier import (
    JudgeQuestion,
    NoReply,
    NoVerdict,
    Response,
    Verdict,
    message_item,
    reasoning_item,
    response_object,
)
from recipes.environments.verifiers import genrm_compare
from recipes.environments.verifiers.genrm_compare import Settings, parse_task, score
from recipes.types import RolloutStatus

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "Which?"}]}}
PLAIN = {"reasoning_bonus": 0.0, "answer_bonus": 0.0}
Judge = Callable[[str, str], Response | NoReply]


def answer(text: str, reasoning: str = "") -> Response:
    return response_object(([reasoning_item([reasoning])] if reasoning else []) + [message_item(text)])


def reply(score_1: float, score_2: float, ranking: float = 3.5) -> Response:
    scores = {"score_1": score_1, "score_2": score_2, "ranking": ranking}
    return response_object([reasoning_item(["hm"]), message_item(f"```json\n{json.dumps(scores)}\n```")])


def shown(question: JudgeQuestion) -> tuple[str, str]:
    texts = dict(question.messages)
    return texts["response_1"], texts["response_2"]


def run(
    answers: Sequence[Response], judge: Judge, **settings: Any
) -> tuple[list[Verdict | NoVerdict], list[list[tuple[str, str]]]]:
    """Return the verdicts, and per round who was compared with whom."""
    scoring, rounds = score(answers, parse_task(ROW, Settings(**{**PLAIN, **settings}))), []
    try:
        questions = next(scoring)
        while True:
            rounds.append([shown(question) for question in questions])
            questions = scoring.send([judge(*shown(question)) for question in questions])
    except StopIteration as end:
        return end.value, rounds


def longer_wins(first: str, second: str) -> Response:
    return reply(float(len(first)), float(len(second)))


def rewards(verdicts: Sequence[Verdict | NoVerdict]) -> list[float | None]:
    return [verdict.reward if isinstance(verdict, Verdict) else None for verdict in verdicts]


def test_each_answer_is_compared_with_its_neighbours() -> None:
    verdicts, rounds = run([answer(text) for text in ("a", "bb", "ccc")], longer_wins)
    assert rounds == [[("a", "bb"), ("bb", "ccc"), ("ccc", "a")]]
    assert rewards(verdicts) == [1.0, 2.0, 3.0]


def test_all_pairs_and_several_opinions() -> None:
    given = [answer(text) for text in ("a", "bb", "ccc", "dddd")]
    verdicts, rounds = run(given, longer_wins, comparison_strategy="all_pairs", num_judges_per_comparison=2)
    assert [len(asked) for asked in rounds] == [12]
    assert rewards(verdicts) == [1.0, 2.0, 3.0, 4.0]
    assert isinstance(verdicts[0], Verdict)
    assert verdicts[0].metrics == {"comparison_score": 1.0, "tie_rate": 0.0, "num_failed_comparisons": 0.0}


def test_the_ranking_breaks_a_tie() -> None:
    verdicts, _ = run([answer("a"), answer("b")], lambda first, _: reply(3, 3, 1.5 if first == "a" else 5.5))
    assert rewards(verdicts) == [5.0, 1.0]  # 3 + (3.5 - 1.5) and 3 - that, in both orders
    assert all(isinstance(verdict, Verdict) and verdict.metrics["tie_rate"] == 1.0 for verdict in verdicts)


def test_the_terms_of_the_stage_are_those_of_the_settings() -> None:
    given = [answer("xxxx", "long thought"), answer("xx", "thought")]
    verdicts, _ = run(
        given,
        lambda *_: reply(3, 3),
        group_reasoning_length_penalty_coeff=0.3,
        group_answer_length_penalty_coeff=0.35,
        reasoning_bonus=0.5,
        answer_bonus=0.25,
    )
    assert rewards(verdicts) == pytest.approx([3 - 0.15 - 0.175, 3 + 0.5 + 0.25 + 0.15 + 0.175])


def test_a_comparison_that_fails_costs_only_the_answers_that_have_no_other() -> None:
    def judge(first: str, second: str) -> Response | NoReply:
        return NoReply(reason="genrm_model: no reply within 3 s") if "bb" in (first, second) else reply(4, 2)

    verdicts, rounds = run([answer(text) for text in ("a", "bb", "ccc", "dddd")], judge)
    assert len(rounds) == 1  # what had no reply is not asked again: the client of the judge has tried
    assert rewards(verdicts) == [2.0, None, 4.0, 3.0]
    lost = verdicts[1]
    assert isinstance(lost, NoVerdict)
    assert lost.status is RolloutStatus.JUDGE_FAILED
    assert lost.reason == "each of its 2 comparisons failed: genrm_model: no reply within 3 s"
    assert isinstance(verdicts[0], Verdict)
    assert verdicts[0].metrics["num_failed_comparisons"] == 1.0


def test_an_answer_without_a_score_is_in_no_term_of_the_group() -> None:
    def judge(first: str, second: str) -> Response | NoReply:
        return NoReply(reason="down") if "b" in (first, second) else reply(3, 3)

    given = [answer("aa"), answer("b"), answer("cccc"), answer("dddd")]
    verdicts, _ = run(given, judge, group_answer_length_penalty_coeff=0.9)
    assert rewards(verdicts) == pytest.approx([3.6, None, 2.7, 2.7])  # (1 - 1/3, 0 - 1/3, 0 - 1/3) * 0.9


def test_a_reply_that_cannot_be_read_is_asked_for_again_and_then_given_up() -> None:
    asked: list[tuple[str, str]] = []

    def judge(first: str, second: str) -> Response:
        asked.append((first, second))
        if (first, second) == ("a", "b"):
            return response_object([message_item("I cannot decide.")])
        return reply(4, 2) if asked.count((first, second)) > 1 else response_object([])

    verdicts, rounds = run([answer("a"), answer("b")], judge, genrm_parse_retries=2)
    assert rounds == [[("a", "b"), ("b", "a")], [("a", "b"), ("b", "a")], [("a", "b")]]
    assert rewards(verdicts) == [2.0, 4.0]
    nothing, _ = run([answer("a"), answer("b")], lambda *_: response_object([]), genrm_parse_retries=0)
    assert rewards(nothing) == [None, None]


def test_a_missing_score_in_a_reply_has_the_default_of_the_settings() -> None:
    half = response_object([message_item('{"score_1": 5}')])
    verdicts, _ = run([answer("a"), answer("b")], lambda *_: half, default_score=1.0)
    assert rewards(verdicts) == [3.0, 3.0]


@pytest.mark.parametrize("count", [0, 1])
def test_there_is_no_score_without_another_answer(count: int) -> None:
    verdicts, rounds = run([answer("a")] * count, longer_wins)
    assert rewards(verdicts) == [None] * count
    assert rounds == []
    assert all(isinstance(verdict, NoVerdict) and "no other answer" in verdict.reason for verdict in verdicts)


def test_equal_answers_are_told_apart_by_their_place() -> None:
    scores = iter([reply(5, 1), reply(4, 2), reply(3, 3.5)])
    verdicts, _ = run([answer("same")] * 3, lambda *_: next(scores))
    assert rewards(verdicts) == [(5 + 3.5) / 2, (1 + 4) / 2, (2 + 3) / 2]


def test_junk_answers_and_replies_raise_nothing() -> None:
    junk: list[Any] = [{}, {"output": None}, {"output": [1, {"type": "message", "content": 3}]}, answer("\ud800" * 9)]
    replies: list[Any] = [{}, {"output": "x"}, reply(float("nan"), 1), reply(1e308, 1e308), reply(3, 3, 7)]
    verdicts, _ = run(junk, lambda *_: replies[0], comparison_strategy="all_pairs")
    assert rewards(verdicts) == [None] * 4
    for given in replies[1:]:
        assert rewards(run(junk, lambda *_, given=given: given)[0]) == [None] * 4
    assert len(genrm_compare.pairs(4, "all_pairs")) == 6


@pytest.mark.parametrize(
    "params",
    [None, 3, {}, {"input": ["text", 3, None, {"role": 7}, {"role": "user"}, {"role": "user", "content": [1, {}]}]}],
)
def test_a_conversation_of_the_wrong_shape_raises_nothing(params: Any) -> None:
    assert all(text == "" for _, text in parse_task({"responses_create_params": params}, Settings()).history)


def test_the_model_is_shown_what_a_user_says_in_parts() -> None:
    parts = [{"type": "input_text", "text": "Write"}, {"type": "input_image"}, {"type": "input_text", "text": "a poem"}]
    params = {"input": [{"role": "user", "content": parts}]}
    assert parse_task({"responses_create_params": params}, Settings()).history == (("user", "Write\na poem"),)


@pytest.mark.timeout(20)  # a search that starts anew at each character takes minutes
@pytest.mark.parametrize(
    "text", ["\n" * 300_000, "\n \t" * 100_000, " " * 300_000 + "x", "```json" + " " * 300_000, "```" * 99_999]
)
def test_long_answers_and_replies_are_read_in_linear_time(text: str) -> None:
    assert genrm_compare.style_density(text) == 0.0
    assert genrm_compare.read_comparison(text) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ['{"a":[' * 1000 + "1," * 100_000, "{" * 300_000, '{"a":' * 100_000, '{"a":' + "1" * 300_000]
)
def test_braces_that_never_close_are_given_up(text: str) -> None:
    assert genrm_compare.read_comparison(text) is None
