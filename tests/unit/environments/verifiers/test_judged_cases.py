"""The verifiers that ask a judge, on every recorded case: the reward, the questions, what the judge is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from recipes.config.tree import build
from recipes.environments.contract.verifier import JudgeQuestion, Scoring, Verdict, message_item, response_object
from recipes.environments.instances import VERIFIERS
from recipes.environments.verifiers import (
    equivalence_llm_judge,
    genrm_compare,
    inverse_if,
    jailbreak_detection,
    math_with_judge,
    multichallenge,
    over_refusal_detection,
)
from recipes.environments.verifiers.genrm_compare import Comparison
from tests.recorded import env_cases, env_cases_of, golden

MODULES: dict[str, ModuleType] = {
    "equivalence_llm_judge_logic": equivalence_llm_judge,
    "jailbreak_detection_logic": jailbreak_detection,
    "over_refusal_detection_logic": over_refusal_detection,
    "multichallenge_logic": multichallenge,
    "inverse_if_logic": inverse_if,
    "math_with_judge_judge_logic": math_with_judge,
}
TEMPLATES = {  # in place of the prompts, so that what the judge is shown can be compared
    "equivalence_llm_judge_logic": "{question}\x00{expected_answer}\x00{generated_answer}",
    "inverse_if_logic": "{prompt}|{model_response}|{standard_response}|{criteria}",
}


def answered(scoring: Verdict | Scoring, replies: Sequence[dict[str, Any]]) -> tuple[Verdict, list[JudgeQuestion]]:
    """Drive a scoring with recorded replies; return its verdict and what was asked."""
    left, asked = list(replies), []
    if isinstance(scoring, Verdict):
        assert not left, "the reference asked"
        return scoring, asked
    try:
        questions = next(scoring)
        while True:
            asked += questions
            taken, left = left[: len(questions)], left[len(questions) :]
            questions = scoring.send(taken)
    except StopIteration as end:
        assert not left, "the reference asked more often"
        return end.value, asked


@pytest.mark.parametrize(("name", "case"), env_cases_of(MODULES))
def test_reward(name: str, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**golden(f"env/{name}.json").get("config", {}), **(case.get("config") or {})}
    if name in TEMPLATES:
        monkeypatch.setattr(MODULES[name], "PROMPT", TEMPLATES[name])
        settings.pop("judge_prompt_template_fpath", None)
        equivalence_llm_judge._template.cache_clear()
    row = {"responses_create_params": {"input": "q"}, **case["row"]}
    task = MODULES[name].parse_task(row, build(MODULES[name].Settings, settings))
    verdict, asked = answered(MODULES[name].score(case["response"], task), case.get("judge_replies", []))
    assert verdict.reward == pytest.approx(case["reward"]), verdict.reason
    for extra in ("num_passed", "num_total", "is_safe", "complied"):
        if extra in case["extras"] and extra in verdict.metrics:
            assert verdict.metrics[extra] == float(case["extras"][extra])
    shown = [question.messages[-1][1] for question in asked]
    if "judge_saw" in case:
        seen = [(saw["question"], saw["expected"], saw["generated"]) for saw in case["judge_saw"]]
        assert [tuple(text.split("\x00")) for text in shown] == seen
    if "judged_answer_pairs" in case:
        pairs = [text.partition("Answer of assistant A:\n")[2].split("\n\nAnswer of assistant B:\n") for text in shown]
        assert [[first, second.rstrip("\n")] for first, second in pairs] == case["judged_answer_pairs"]
    if "judge_prompts" in case:
        assert shown == case["judge_prompts"]


@pytest.mark.parametrize("case", env_cases("multichallenge_logic", "verdict_parsing"))
def test_a_word_of_the_judge(case: dict[str, Any]) -> None:
    assert multichallenge.spoken(case["text"], "[[YES]]", "[[NO]]") == case["verdict"]


@pytest.mark.parametrize("case", env_cases("inverse_if_logic", "verdict_parsing"))
def test_a_grade_of_the_judge(case: dict[str, Any]) -> None:
    word, why = inverse_if.verdict_of(case["text"])
    assert word == case["verdict"][0]
    # The reference does not read an explanation with braces in it.
    assert why == case["verdict"][1] or (not case["verdict"][1] and "{" in why)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("PASS", "PASS"),
        ("The criterion is met: pass.", "PASS"),
        ("This would be PASSABLE", "PASS"),
        ("It could FAIL elsewhere.\nPASS", "PASS"),
        ("It could PASS elsewhere.\nFAIL", "FAIL"),
        ("PASS or FAIL", "FAIL"),
        ("Does it pass? No: fail.", "FAIL"),
        ("**FAIL**, as it does not PASS", "FAIL"),
        ("PASS\nPASS/FAIL", "FAIL"),
        *((f"It could FAIL{sign}PASS", "FAIL") for sign in "\v\f\x1c\x1d\x1e\x85\u2028"),  # one line
        ("PASS\nend with PASS, or with FAIL\n\n", "FAIL"),
    ],
)
def test_a_line_with_both_words_is_no_pass(text: str, word: str) -> None:
    assert inverse_if.verdict_of(text) == (word, "")


@pytest.mark.parametrize("word", ["PASS", "FAIL"])
@pytest.mark.parametrize("why", ["it sets {x}", "} and {", "a } b", {"a": {"b": 1}}, ["{"], '[1] {"result"'])
def test_a_grade_may_hold_objects_and_braces(word: str, why: Any) -> None:
    graded = json.dumps({"explanation": why, "result": word})
    for reply in (graded, f"So {{x}} is set.\n{graded}", f"{graded} It is not the {{'PASS'}} or FAIL of before."):
        assert inverse_if.verdict_of(reply) == (word, str(why))


@pytest.mark.parametrize("case", env_cases("genrm_misc", "parse"))
def test_a_comparison_is_read(case: dict[str, Any]) -> None:
    read = genrm_compare.read_comparison(case["text"])
    assert (read and [read.score_1, read.score_2, read.ranking]) == case["parsed"]


@pytest.mark.parametrize("case", env_cases("genrm_misc", "style"))
def test_style_density(case: dict[str, Any]) -> None:
    assert genrm_compare.style_density(case["text"]) == pytest.approx(case["density"])


@pytest.mark.parametrize("case", env_cases("genrm_misc", "extract_output_text"))
def test_the_answer_that_the_model_is_shown(case: dict[str, Any]) -> None:
    assert genrm_compare.shown_answer(case["obj"]) == case["text"]


@pytest.mark.parametrize("case", env_cases("genrm_aggregate"))
def test_rewards_of_a_group(case: dict[str, Any]) -> None:
    assert [list(pair) for pair in genrm_compare.pairs(case["n"], case["strategy"])] == case["pairs"]
    params = case["params"]
    weights = build(genrm_compare.Settings, params)
    compared = {
        tuple(key): Comparison(score_1=first, score_2=second, ranking=ranking)
        for key, (first, second, ranking) in zip(case["comparison_metadata"], case["comparison_results"], strict=True)
    }
    final, base = genrm_compare.rewards(case["response_objs"], compared, weights)
    assert base == pytest.approx(case["base"])
    assert final == pytest.approx(case["final"])


def test_an_expression_reads_the_end_of_a_long_answer() -> None:
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "q"}]},
        "expected_answer": "7",
        "template_metadata": {"output_regex": r"\(\((.*?)\)\)"},  # takes the square of a text's length to find nothing
    }
    task = VERIFIERS["equivalence_llm_judge"].parse_task(row, VERIFIERS["equivalence_llm_judge"].settings())
    for text, shown in (("(" * 1_000_000, "(" * 100), ("(" * 1_000_000 + ")) so ((7))", "Answer B (student):\n7\n")):
        scoring = VERIFIERS["equivalence_llm_judge"].score(response_object([message_item(text)]), task)
        assert not isinstance(scoring, Verdict)
        (question,) = next(scoring)
        assert shown in question.messages[-1][1]


def test_braces_in_an_answer_cannot_fill_the_template() -> None:
    row = {"responses_create_params": {"input": "q"}, "safe_prompt": "SP {model_response}"}
    settings = over_refusal_detection.Settings(judge_prompt_template="{safe_prompt}|{model_response}|{{x}}{y}")
    task = over_refusal_detection.parse_task(row, settings)
    response = {"output": [{"type": "message", "content": [{"type": "output_text", "text": "{safe_prompt}{{x}}"}]}]}
    (question,) = next(over_refusal_detection.score(response, task))
    assert question.messages[-1][1] == "SP {model_response}|{safe_prompt}{{x}}|{x}{y}"


WORST = (
    "<think>",
    "</think>",
    "<thinking></think>",
    "{",
    '{"a":',
    "```{",
    "```json",
    "**a",
    "__a",
    "- ",
    "# ",
    "\n",
    "1. ",
)


@pytest.mark.parametrize("unit", WORST)
def test_any_reply_is_read_in_time_linear_in_its_length(unit: str) -> None:
    """Process time, so that a busy machine does not matter; a quadratic reader takes far longer on 100 kB."""
    text = unit * (100_000 // len(unit))
    start = time.process_time()
    multichallenge.spoken(text, "[[YES]]", "[[NO]]")
    inverse_if.verdict_of(text)
    genrm_compare.read_comparison(text)
    genrm_compare.style_density(text)
    assert time.process_time() - start < 2.5


def test_the_expression_of_the_question_runs_where_scores_are_made() -> None:
    """Not where rows are read: that is the event loop of all rollouts."""
    verifier = VERIFIERS["equivalence_llm_judge"]
    row = {"responses_create_params": {"input": "a text</text>\n\nWhy?"}, "expected_answer": "5"}
    assert verifier.parse_task(row, verifier.settings(question_extract_regex="(one that no program can read"))
    task = verifier.parse_task(row, verifier.settings(question_extract_regex=r"</text>\n\n(.*)$"))
    scoring = verifier.score(response_object([message_item("5")]), task)
    assert not isinstance(scoring, Verdict)
    (question,) = next(scoring)
    assert "Question:\nWhy?\n" in question.messages[-1][1]
