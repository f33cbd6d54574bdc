"""Tiny tasks with programs: one that its tests run, and a remainder that the model lets Python compute."""

from __future__ import annotations

from random import Random

from tools.tiny.tasks import Reply, TinyProblem, TinyTask
from tools.tiny.tool_tasks import tool, write_call

# A program of one line for a formula. The wrong ones leave a term out or take another number.

TEST_INPUTS = (2, 5)


def _draw_program(rng: Random) -> TinyProblem:
    factor, term = rng.randint(10, 99), rng.randint(1, 9)
    tests = {"inputs": [f"{n}\n" for n in TEST_INPUTS], "outputs": [f"{n * factor + term}\n" for n in TEST_INPUTS]}
    return TinyProblem(
        prompt=f"Program for n*{factor}+{term}",
        fields={"verifier_metadata": {"unit_tests": {**tests, "fn_name": None}}},
        facts={"factor": factor, "term": term},
    )


def _write_program(formula: str) -> str:
    return f"</think>```\nprint(int(input())*{formula})\n```"


def _right_program(problem: TinyProblem) -> str:
    return _write_program(f"{problem.facts['factor']}+{problem.facts['term']}")


def _wrong_program(problem: TinyProblem, rng: Random) -> str:
    factor, term = problem.facts["factor"], problem.facts["term"]
    if rng.random() < 0.5:
        return _write_program(f"{factor}")
    return _write_program(f"{factor}+{term % 9 + 1}")


# The remainder of a product, too hard to guess. The right demonstrations ask Python for it and copy its two digits.

PYTHON = tool("stateful_python_code_exec", code=str)


def _draw_remainder(rng: Random) -> TinyProblem:
    first, second = rng.randint(11, 99), rng.randint(11, 99)
    formula = f"{first}*{second}%90+10"
    question = f"Run {formula}"
    return TinyProblem(
        prompt=f"{question}. Answer in \\boxed{{}}",
        fields={"question": question, "expected_answer": str(first * second % 90 + 10)},
        facts={"code": f"print({formula})"},
        tools=(PYTHON,),
    )


def _right_remainder(problem: TinyProblem) -> Reply:
    answer = problem.fields["expected_answer"]
    return write_call(PYTHON["name"], {"code": problem.facts["code"]}), answer, f"</think>\\boxed{{{answer}}}"


def _guessed_remainder(problem: TinyProblem, rng: Random) -> Reply:
    return f"</think>\\boxed{{{rng.randint(10, 99)}}}"


PROGRAMS = TinyTask(
    agent="code_gen_simple_agent", draw=_draw_program, right=_right_program, wrong=_wrong_program, wrong_share=0.65
)
REMAINDERS = TinyTask(
    agent="ns_tools_simple_agent",
    draw=_draw_remainder,
    right=_right_remainder,
    wrong=_guessed_remainder,
    wrong_share=0.5,
)
WORDS = (
    *("Program for n*", "```\nprint(int(input())*", ")\n```", "stateful_python_code_exec", "code", "print("),
    *("Run ", "%90+10", ")</parameter></function></tool_call>", ". Answer in "),
)
