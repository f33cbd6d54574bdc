"""What may reach a library that evaluates text."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from recipes.environments.verifiers.reasoning_gym import (
    EVALUATED,
    Settings,
    _is_formula,
    is_expression,
    is_literal,
    parse_task,
    score,
)

FUNCTIONS = {"sin", "sqrt"}


@pytest.mark.parametrize(
    "text", ["[1, 2]", " ['a', \"b\"]", "((1, -2.5), {3})", "{'a': [0x10]}", "'abc'", "1 + 2 * 3", "(0x1 << 2) >> 1"]
)
def test_literals(text: str) -> None:
    assert is_literal(text)


@pytest.mark.parametrize(
    "text",
    [
        *("f()", "x", "[x for x in 'abc']", "().__class__", "'a'.join([])", "[1][0]", "lambda: 1", "f'{1}'", "x := 1"),
        *("", "=", "(" * 1000, "-" * 100_000, "[" * 100_000, "1 if 1 else 2", "\x00", "__import__('os')"),
        *("9**9**9", "[2**3]", "[0] * 9", "9 * (0,)", "'a' * 9", "b'a' * 9", "('a' + 'b') * 9", "'%999d' % 1"),
        *("1 << 9999999999", "1 << (9 * 9)", "1 << -1", "[[1], [1 << 1 << 9999]]", "{1: 'a' * 9}"),
    ],
)
def test_no_literals(text: str) -> None:
    assert not is_literal(text)


@pytest.mark.parametrize(
    "text", ["40*(94 - 90) + 83 - 74", "4! + 1", "x**2/2 + C", "x*sin(3*x) + sqrt(1 - 9*x**2)/3", "0.2[1]", " 1 "]
)
def test_expressions(text: str) -> None:
    assert is_expression(text, FUNCTIONS)


@pytest.mark.parametrize(
    "text",
    [
        *("eval(x)", "sin.__class__", "(sin)(x).args", "'a'", "sqrt('x')", "x.diff()", "__x", "x[0]", "a, b"),
        *("sin(x, key=1)", "(lambda: 1)()", "S('1')", "x == y", "\uff45\uff56\uff41\uff4c(1)", "sin(*x)", "{1}"),
    ],
)
def test_no_expressions(text: str) -> None:
    assert not is_expression(text, FUNCTIONS)


def test_formulas_of_the_library_pass() -> None:
    assert _is_formula("x*asin(3*x) + sqrt(1 - 9*x**2)/3 + C")
    assert _is_formula("log(x) + exp(2*x) - Abs(x)")
    assert not _is_formula("sympify(1)")


def test_every_family_that_evaluates_is_guarded() -> None:
    """An upgrade of the library that evaluates elsewhere must be seen here."""
    evaluators = {"eval", "exec", "parse_expr", "sympify", "parse_latex", "compile", "__import__"}
    names = set()
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None and spec.origin is not None
    for path in Path(spec.origin).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if not any(word in source for word in evaluators):  # most files: not worth parsing
            continue
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef) and function.name in ("score_answer", "verify_solution"):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call):
                        called = ast.unparse(node.func).rpartition(".")[2]
                        if called in evaluators:
                            names.add(path.stem)
    assert names == EVALUATED.keys()


@pytest.mark.parametrize("name", EVALUATED)
def test_a_payload_scores_what_nonsense_scores(name: str) -> None:
    fields = {"numbers": [1], "target": 1, "valid_answers": ["x"], "variable": "x", "integrand": "x", "problem": "1"}
    row = {"question": "q", "answer": "[1]", "metadata": {"source_dataset": name, "direction": "ascending", **fields}}
    if name == "polynomial_multiplication":
        row["answer"] = "x"
    task = parse_task(row, Settings())

    def reward(text: str) -> float:
        return score({"output": [{"type": "message", "content": [{"text": f"<answer>{text}</answer>"}]}]}, task).reward

    assert reward("(lambda: 1)()") == reward("=")


@pytest.mark.parametrize(
    ("name", "field"),
    [("number_sorting", "answer"), ("bitwise_arithmetic", "problem"), ("simple_integration", "integrand")],
)
def test_a_row_that_would_be_run_has_no_verdict(name: str, field: str) -> None:
    payload = "__import__('os').getpid()"
    row = {"question": "q", "answer": payload, "metadata": {"source_dataset": name, field: payload, "variable": "x"}}
    with pytest.raises(ValueError, match=f"field '{field}': .* is not safe to evaluate"):
        score({"output": []}, parse_task(row, Settings()))
