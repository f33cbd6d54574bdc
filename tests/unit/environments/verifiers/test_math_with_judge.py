"""Symbolic comparison with a known answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.contract.verifier import Verdict, advance
from recipes.environments.verifiers import math_with_judge
from recipes.environments.verifiers.math_with_judge import MAX_CHARS, Settings, Task, boxed_gold, parse_task, score

Answer = Callable[..., dict[str, Any]]
ROW = {"question": "What is 3/4 + 1/4?", "expected_answer": "1"}


def test_correct_in_another_form(answer: Answer) -> None:
    verdict = score(answer("It is \\boxed{100\\%}."), parse_task(ROW, Settings()))
    assert verdict.reward == 1.0
    assert verdict.reason == "100*(1/100) equals 1"
    assert verdict.metrics == {"library_reward": 1.0}


def test_wrong(answer: Answer) -> None:
    verdict = score(answer("\\boxed{2}"), parse_task(ROW, Settings()))
    assert (verdict.reward, verdict.reason) == (0.0, "2 differs from 1")


def test_empty(answer: Answer) -> None:
    assert score(answer(" \n"), parse_task(ROW, Settings())).reason == "the answer is empty"
    assert score({"output": []}, parse_task(ROW, Settings())).reward == 0.0


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
    task = parse_task(gym_row("math_with_judge"), Settings())
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
        parse_task(row, Settings())


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
        scored = advance(score(answer("1+" * 400), task), replies)
    assert scored.reward == 1.0 and len(compared) == 1  # type: ignore[union-attr]


def test_refuses_to_run_without_its_time_limit(answer: Answer) -> None:
    """A signal reaches the main thread only; elsewhere a check would have no limit."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            score(answer("\\boxed{1}"), parse_task(ROW, Settings()))
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


# (what is boxed, the expected answer, the question)
UNFINISHED = [
    ("200+10+5", "215", "Compute 200+10+5."),
    ("200 + 10 + 5", "215", "Compute $200 + 10 + 5$."),
    ("5+200+10", "215", "Compute 200+10+5."),
    ("x = 200+10+5", "215", "?"),
    ("17 \\cdot 3", "51", "?"),
    ("3*(4+1)", "15", "?"),
    ("2^{10}", "1024", "What is $2^{10}$?"),
    ("6/8", "\\frac{3}{4}", "Simplify 6/8."),
    ("\\frac{6}{8}", "\\frac34", "Simplify $\\frac{6}{8}$."),
    ("\\int_0^1 x^2 dx", "\\frac{1}{3}", "?"),
    ("\\sum_{k=1}^{4} k", "10", "?"),
    ("\\prod_{k=1}^3 k", "6", "?"),
    ("\\lim_{x\\to 0} 24", "24", "?"),
    ("\\frac{d}{dx} x^2", "2x", "?"),
    ("\\frac{\\mathrm{d}}{\\mathrm{d}x} x^2", "2x", "?"),
    ("\\binom{10}{5}", "252", "?"),
    ("5, 5", "5", "?"),
    ("5,5,5", "5", "?"),
    ("x=x", "x", "?"),
    ("\\sqrt{144}", "12", "?"),
    ("\\log_2 8", "3", "?"),
    ("\\lfloor 7.5 \\rfloor", "7", "?"),
    ("|-5|", "5", "?"),
    ("3!", "6", "?"),
    ("\\cos 0", "1", "?"),
    ("5\\cdot 1^2", "5", "?"),
    ("1=\\sqrt{144}", "12", "?"),
    ("\\frac{1}{3}+\\frac{1}{2}", "\\frac{5}{6}", "?"),
    ("1/3+1/2", "x=\\frac56", "?"),
    *(("200+5+10", gold, "?") for gold in ("215^\\circ", "\\$215", "x=215", "215\\text{ cm}", "215.0")),
    ("\\frac{430}{2}", "215", "?"),
    ("5,10/2", "5", "?"),
    ("6/8", "0.75", "Simplify 6/8."),
]
FINISHED = [
    ("1/3", "\\frac{1}{3}", "Is it 1/3 or 1/2?"),
    ("1/3", "\\frac13", "Is it 1/3 or 1/2?"),
    ("2\\sqrt{3}", "2\\sqrt{3}", "?"),
    ("\\sqrt{12}", "2\\sqrt{3}", "?"),
    ("1+\\sqrt{2}", "\\sqrt{2}+1", "?"),
    ("7/2", "3.5", "?"),
    ("1,234", "1234", "?"),
    ("x=5", "5", "?"),
    ("y=x", "x", "?"),
    ("3+4=7", "7", "What is 3+4?"),
    ("10^6", "1000000", "?"),
    ("2\\cdot 10^{3}", "2000", "?"),
    ("(5,5)", "(5,5)", "?"),
    ("1,2", "\\{1,2\\}", "?"),
    ("-5", "-5", "What is 2-5-2?"),
    ("x^2-4", "(x-2)(x+2)", "?"),
    ("\\binom{n}{2}", "\\frac{n(n-1)}{2}", "?"),
    ("50\\%", "0.5", "?"),
    ("\\frac{1}{2}", "0.5", "An urn has 11/20 red balls."),
    ("\\frac{1}{2}", "0.5", "Is it 1/2?"),
    ("x=\\frac{1}{2}", "x=0.5", "An urn has 11/20 red balls."),
    ("6/8", "0.75", "Of 16/8 and 6/81, 6/8.5 and 1/6/8?"),
    ("\\frac{2}{4}", "\\frac{1}{2}", "?"),
    ("-\\frac{1}{2}", "-0.5", "?"),
    ("\\frac{-1}{2}", "-\\frac12", "?"),
    ("2\\frac{1}{2}", "\\frac{5}{2}", "?"),
    ("1\\frac{1}{11}", "\\frac{12}{11}", "?"),
    ("215", "215^\\circ", "?"),
    ("215^\\circ", "215", "?"),
    ("215^{\\circ}", "215^\\circ", "?"),
    ("\\$215", "\\$215", "?"),
    ("\\text{215}", "215", "?"),
    ("12\\text{ cm}^2", "12\\text{ cm}^2", "?"),
    ("12\\mathrm{ km/h}", "12", "?"),
    ("1{,}234", "1234", "?"),
    ("1.5\\times 10^{-5}", "0.000015", "?"),
    ("x=5", "x=5", "?"),
    ("5=x", "x=5", "?"),
    ("(-5)", "-5", "?"),
    ("1,2", "x=1, x=2", "?"),
    ("\\binom{5}{2}=10", "10", "?"),
    ("10", "\\binom{5}{2}", "?"),
]


@pytest.mark.parametrize(("boxed", "expected", "question"), [*UNFINISHED, *FINISHED])
def test_an_answer_is_a_value_and_not_work_left_to_do(
    boxed: str, expected: str, question: str, answer: Callable[..., dict[str, Any]]
) -> None:
    for settings in ({}, {"should_use_judge": True}):
        row = {"question": question, "expected_answer": expected}
        verdict = score(answer(f"So it is \\boxed{{{boxed}}}."), parse_task(row, Settings(**settings)))
        assert isinstance(verdict, Verdict), "no judge is asked"
        assert verdict.reward == float((boxed, expected, question) in FINISHED), verdict.reason


def test_a_check_that_meets_its_limit_says_nothing(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is it kept: the same answer is checked again, and the judge decides where there is one."""

    def endless(*_: object) -> tuple[bool, str | None, str]:
        while True:
            try:
                while True:
                    pass
            except Exception:  # as a library may
                pass

    monkeypatch.setattr(math_with_judge, "SYMBOLIC_SECONDS", 0.02)
    with monkeypatch.context() as slow:
        slow.setattr(math_with_judge, "_compare", endless)
        with pytest.raises(RuntimeError, match=r"more than 0\.02 s of processor time"):
            score(answer("\\boxed{5.0}"), Task(expected_answer="5"))
        judged = Task(expected_answer="5", question="q", asks_judge=True)
        assert isinstance(advance(score(answer("\\boxed{5.0}"), judged), ()), list)
    monkeypatch.setattr(math_with_judge, "SYMBOLIC_SECONDS", 12.0)
    assert score(answer("\\boxed{5.0}"), Task(expected_answer="5")).reward == 1.0  # type: ignore[union-attr]


GIANTS = [
    *("9^{9^{9^{9}}}", "9**9**9**9", "9^{9^{9^9}}", "((9^{9999})^{9999})^{9999}", "\\left(9^{9999}\\right)^{9999}"),
    *("99!!!!", "(((9!)!)!)!", "\\binom{10^9}{10^8}", "10^{10^{10}}", "2^{300001}", "(x+1)^{1000}"),
    *("(x+y+1)^{100}", "((x+1)^{300})^{300}", "(a+b+c+d+e)^{12}"),
]
SMALL = [
    *("10^{100}", "2^{1000}", "2^{2^{10}}", "2^{-1000}", "3.5 \\times 10^{-19}", "20000!", "\\binom{2024}{12}"),
    *(
        "x^{2023}+1",
        "e^{2\\pi i}",
        "\\sqrt[3]{2}^5",
        "x^{x^{x^{x}}}",
        "(x+1)^{300}",
        "(a+b+c)^{20}",
        "It is 1000000!",
        "10^",
        "))^9",
        "^^",
        "[0, 1)",
    ),
]


def test_what_is_too_large_to_work_out_is_a_name_for_itself() -> None:
    for text in GIANTS:
        named = math_with_judge.with_named_giants(f"$x + {text}$")
        assert named.startswith("$x + P_{"), text
        assert named.endswith("}$"), text
        assert named.count("{") == 1, text
    assert [math_with_judge.with_named_giants(text) for text in SMALL] == SMALL


def test_huge_numbers_and_deep_brackets_cost_little(answer: Answer) -> None:
    deep = "(" * 2_000 + "1" + ")" * 2_000
    many = ("9^" * 50_000, "9!" * 100, deep, "{9^" * 200 + "9" + "}" * 200, "9!" * 50_000, "{" * 14 + "1" + "}" * 14)
    for text in (*GIANTS, *many, *(opened * 12 + "x" + ")" * 12 for opened in ("\\sin(", "\\left(1+")), *long_ones()):
        start = time.process_time()
        verdict = score(answer(f"\\boxed{{{text}}} {text} ${text}$"), Task(expected_answer="42"))
        assert isinstance(verdict, Verdict)
        assert verdict.reward == 0.0, text[:80]
        assert time.process_time() - start < 2.0, text[:80]


def long_ones() -> list[str]:
    """Return formulas that take the library many seconds only because they are long."""
    factors, numbers = "*".join(f"(x+{n})" for n in range(300)), ",".join(map(str, range(3000)))
    intervals = "\\cup".join(f"({n},{n}.5)" for n in range(200))
    return [factors, f"\\{{{numbers}\\}}", numbers, intervals, "x" * 20_000, "1+" * 10_000 + "1"]


WAYS = [
    *(
        "$$ {} $$",
        "\\boxed{{}} ${}$",
        "$1$ or $$ {} $$",
        "Final answer is ${}$",
        "Final answer is $${}$$. I hope",
        "{}",
    ),
    *(
        "\\[ {} \\]",
        "\\({}\\)",
        "so [{}] .",
        "answer: {}",
        "\\fbox{{{}}}",
        "\\boxed{{1}} and \\boxed{{{}}}",
        "answer = {}",
    ),
    *("\\boxed{{\\text{{{}}}}}", "\\boxed{{5 and {}}}", "$1$, and ${}$", "\\[ \\boxed{{{}}} \\]", "$\\mathbf{{{}}}$"),
]
HEAVY = ["(" * 14 + "x+1" + ")" * 14, " * ".join(["3^{100000}"] * 20), "9^9^9^9^9", " + ".join(["1"] * 1_100)]
HEAVY += [" * ".join(f"(x + {n})" for n in range(300)), "".join(f"(x+{n})^{{9}}" for n in range(90))]
UNCLOSED = ["$$" + "\\boxed{a}" * 20_000, "\\(" * 90_000, "\\[" * 90_000 + "\\boxed{a}" * 50, "1" + " " * 90_000 + "x"]
UNCLOSED += [
    "1+" * 90_000 + "1x",
    "\\boxed{" * 30_000,
    "$\\foo{$ " * 20_000,
    "\\(" * 20_000 + "\n\\)",
    "}" + "\\boxed{a" * 20_000,
]


@pytest.mark.parametrize("heavy", HEAVY, ids=lambda text: text[:12])
def test_what_is_heavy_costs_little_wherever_the_library_finds_it(answer: Answer, heavy: str) -> None:
    for way in WAYS:
        start = time.process_time()
        verdict = score(answer(way.format(heavy)), Task(expected_answer="42"))
        assert isinstance(verdict, Verdict)
        assert verdict.reward == 0.0, way
        assert time.process_time() - start < 2.0, way


@pytest.mark.parametrize("text", UNCLOSED, ids=lambda text: text[:12])
def test_what_nothing_closes_costs_the_patterns_little(answer: Answer, text: str) -> None:
    start = time.process_time()
    assert score(answer(text), Task(expected_answer="42")).reward == 0.0  # type: ignore[union-attr]
    assert time.process_time() - start < 4.0
    assert score(answer(f"{text}\n{'that is it ' * 9}\n\\boxed{{42}}"), Task(expected_answer="42")).reward == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("behind", ["$ " + "{" * 13 + "1" + "}" * 13 + " $", f"$$ {'x+' * 1200}1 $$"])
def test_what_cannot_be_read_hides_no_work_that_is_left(answer: Answer, behind: str) -> None:
    """The check of the value is about the formula that was read, not about the first that was tried."""
    task = Task(expected_answer="215", question="What is 200+10+5?")
    for text, reward in (("$200+10+5$", 0.0), ("$215$", 1.0)):
        for said in (text, f"It is {text}. {behind}", f"It is {text}. {behind.replace('1', '1+1')}"):
            assert score(answer(said), task).reward == reward, said  # type: ignore[union-attr]


def test_a_long_formula_beside_the_answer_does_no_harm(answer: Answer) -> None:
    long = "x+" * 2_000
    for text, reward in (
        (f"${long}$ so \\boxed{{5}}", 1.0),
        (f"It is ${long}$, thus $5$", 1.0),
        (f"\\boxed{{{long}5}}", 0.0),
        (f"{'((' * 20} 1 {'))' * 20} so \\boxed{{5}}", 1.0),
    ):
        assert score(answer(text), Task(expected_answer="5")).reward == reward, text[-40:]  # type: ignore[union-attr]
    deep = Task(expected_answer="[" * 100_000)  # a row that nobody can answer
    assert score(answer("\\boxed{5}"), deep).reward == 0.0  # type: ignore[union-attr]
    same = "x+" * 600 + "x"
    assert score(answer(f"\\boxed{{{same}}}"), Task(expected_answer=same)).reward == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "expected", "reward"),
    [
        ("\\boxed{10^{100}}", "10^{100}", 1.0),
        ("\\boxed{2^{1000}}", "4^{500}", 1.0),
        ("\\boxed{4^{10000}}", "2^{20000}", 1.0),
        ("\\boxed{10^{10^{10}}}", "10^{10^{10}}", 1.0),
        ("\\boxed{3 \\cdot 10^{10^{10}}}", "10^{10^{10}} \\cdot 3", 1.0),
        ("As $7^{9^{9^9}}$ ends in 7, \\boxed{7}", "7", 1.0),
        ("\\boxed{9^{9^{9^9}}}", "10^{10^{10}}", None),
        ("\\boxed{10^{10^{11}}}", "10^{10^{10}}", None),
        ("\\boxed{" + "(" * 5 + "x+1" + ")" * 5 + "}", "x+1", 1.0),
        ("\\boxed{\\binom{29999}{15000}}", "\\binom{29999}{15000}", 1.0),
        ("\\boxed{(x+1)^{2023}}", "(x+1)^{2023}", 1.0),
    ],
)
def test_right_answers_with_large_numbers(answer: Answer, text: str, expected: str, reward: float | None) -> None:
    task = Task(expected_answer=expected)
    if reward is None:
        with pytest.raises(RuntimeError, match="too large to work out"):
            score(answer(text), task)
    else:
        assert score(answer(text), task).reward == reward
