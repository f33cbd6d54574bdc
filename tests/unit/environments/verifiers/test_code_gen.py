"""Programs for problems with tests: what is run, how answers are compared, what each end of a run means."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recipes.environments.contract.verifier import Execution, Verdict, advance, message_item, reasoning_item
from recipes.environments.verifiers.checks import program_harness
from recipes.environments.verifiers.code_gen import (
    VERIFIER,
    has_misplaced_tags,
    is_same_output,
    is_same_value,
    program_in,
)

PROGRAM = "```python\nprint(input())\n```"


def task(outputs: list[str], fn_name: str | None = None, inputs: list[str] | None = None, **settings: Any) -> Any:
    tests = {"inputs": inputs or [str(n) for n in range(len(outputs))], "outputs": outputs, "fn_name": fn_name}
    return VERIFIER.parse_task({"verifier_metadata": {"unit_tests": tests}}, VERIFIER.settings(**settings))


def reply(*answers: Any, status: str = "completed", **fields: str) -> dict[str, Any]:
    lines = [{"ready": True}, *answers]
    return {"process_status": status, "stdout": "".join(json.dumps(line) + "\n" for line in lines), **fields}


def scored(given: Any, *replies: dict[str, Any], text: str = PROGRAM) -> Verdict | list[Any]:
    response = {"output": [message_item(text)]}
    return advance(VERIFIER.score(response, given), [[each] for each in replies])


def test_the_program_is_between_the_last_two_fences() -> None:
    assert program_in("```\na\n```\ntext\n```python\nb\nc\n```\nend") == "b\nc"
    assert program_in("```python\na\n```\n```python\nnever closed") is None  # the last two fences enclose nothing
    assert program_in("```python\na") is None
    assert program_in("") is None


def test_what_expects_is_not_sent_and_batches_grow() -> None:
    given = task([f"secret-{n}" for n in range(30)])
    replies: list[dict[str, Any]] = []
    sizes, sent = [], ""
    while isinstance(asked := scored(given, *replies), list):
        (execution,) = asked
        assert isinstance(execution, Execution)
        sent += execution.stdin + execution.code
        inputs = json.loads(execution.stdin)["inputs"]
        sizes.append(len(inputs))
        replies.append(reply(*({"output": f"secret-{n}\n"} for n in inputs)))
    assert (asked.reward, sizes) == (1.0, [1, 4, 16, 9])
    assert "secret" not in sent


@pytest.mark.parametrize("letter", ["x", "\n", "\u4e2d"])
def test_a_long_output_that_is_right_is_not_cut(letter: str) -> None:
    given = task([f"<{letter * 1_200_000}>"])
    (execution,) = scored(given)  # type: ignore[misc]
    assert isinstance(execution, Execution)
    right = reply({"output": f"<{letter * 1_200_000}>\n"})
    right["stdout"] = right["stdout"][: execution.max_characters]  # as a sandbox cuts it
    verdict = scored(given, right)
    assert isinstance(verdict, Verdict) and verdict.reward == 1.0


def test_a_row_that_no_program_could_pass_is_refused() -> None:
    most = program_harness.MAX_OUTPUT_CHARACTERS
    with pytest.raises(ValueError, match=f"outputs': got number {most + 1}, expected at most {most} characters"):
        task(["1", "1" * (most + 1)])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply({"output": "2"}), "test 1 of 2: wrong output"),
        (reply({"time": 10.0}), "test 1 of 2: more than 10 s"),
        (reply({"error": "KeyError: 1"}), "test 1 of 2: KeyError: 1"),
        (reply({"error": "Odd: \ud800"}), "test 1 of 2: Odd: ?"),
        ({**reply(status="timeout"), "used_seconds": 41.0}, "test 1 of 2: no end within its time"),
        (reply(status="error", stderr="Killed: more than 4096 MiB of memory\n"), "Killed: more than 4096 MiB"),
        (reply(), "test 1 of 2: the program ended its process: silently"),
        (reply([1]), "test 1 of 2: the program broke its report"),
        (reply(3), "the program broke its report"),
        (reply({"reward": 1.0, "passed": True}), "wrong output"),
        ({"process_status": "completed", "stdout": '{"ready": true}\n{"output": "1'}, "ended its process"),
        ({"process_status": "completed", "stdout": '{"ready": true}\n' + "[" * 100_000 + "\n"}, "broke its report"),
    ],
)
def test_what_a_program_does_wrong_earns_nothing(answer: dict[str, Any], reason: str) -> None:
    verdict = scored(task(["1", "2"]), answer)
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 0.0
    assert reason in verdict.reason


@pytest.mark.parametrize("answer", [{}, {"stdout": ""}, {"stdout": "bwrap: no", "stderr": ""}, {"stdout": 5}])
def test_a_sandbox_that_starts_nothing_gives_no_verdict(answer: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="the sandbox did not start the program"):
        scored(task(["1"]), {"process_status": "error", **answer})


@pytest.mark.parametrize("used", [{}, {"used_seconds": None}, {"used_seconds": 0.0}, {"used_seconds": 40.9}])
def test_a_program_that_lacked_the_processor_has_no_verdict(used: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="a busy machine: the program had"):
        scored(task(["1", "2"]), {**reply(status="timeout"), **used})


def test_thinking_tags_cost_the_reward_and_run_nothing() -> None:
    verdict = scored(task(["1"], reasoning_format_penalty=-0.5), text="<think>" + PROGRAM)
    assert isinstance(verdict, Verdict)
    assert verdict.reward == -0.5
    once, twice = ({"output": [reasoning_item(["a </think>"] * n), message_item(PROGRAM)]} for n in (1, 2))
    assert not has_misplaced_tags(once)
    assert has_misplaced_tags(twice)
    assert not has_misplaced_tags({"output": [{"type": "reasoning", "summary": [None, {"text": 3}, "x"]}]})


def test_a_row_without_tests_asks_whether_the_program_compiles() -> None:
    assert isinstance(good := scored(task([]), reply()), Verdict)
    assert isinstance(bad := scored(task([]), reply({"error": "SyntaxError: no"})), Verdict)
    assert (good.reward, bad.reward) == (1.0, 0.0)


def test_a_row_that_expects_no_json_of_a_function_cannot_be_passed() -> None:
    verdict = scored(task(["[1"], "f"), reply({"value": [1]}))
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 0.0
    assert "no JSON" in verdict.reason


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("1\n2", "1\n2\n\n", True),
        (" 1 \n 2", "1\n2", True),
        ("1 2", "1\n2", False),
        ("1.0 2", "1 2.000", True),
        ("1.0000001", "1", False),
        ("a  b", "a b", False),
        ("nan", "NaN", False),
        ("snan", "1", False),
        ("1e999999999", "1", False),
        ("", "", True),
        ("", "0", False),
        ("9" * 1_000_000, "9" * 999_999 + "8", False),
    ],
)
def test_outputs(printed: str, expected: str, is_same: bool) -> None:
    assert is_same_output(printed, expected) is is_same


@pytest.mark.parametrize(
    ("value", "expected", "is_same"),
    [
        ([1, [2, 3]], [1, [2, 3]], True),
        (1.0000001, 1, True),
        (1.1, 1, False),
        ("1", 1, True),
        ("x", 1, False),
        (None, None, True),
        (None, 0, False),
        (float("nan"), float("nan"), True),
        (float("inf"), 1.0, False),
        (1.0, float("inf"), False),
        (float("inf"), float("inf"), True),
        ({"a": 1}, {"a": 1.0}, True),
        ([1.0000001], [1], False),
        (10**400, 1, False),
        ("9" * 5000, 1, False),
    ],
)
def test_values(value: Any, expected: Any, is_same: bool) -> None:
    assert is_same_value(value, expected) is is_same


def test_a_row_needs_its_tests(gym_row: Callable[..., dict[str, Any]]) -> None:
    for index in range(5):
        assert len(VERIFIER.parse_task(gym_row("code_gen", index), VERIFIER.settings()).inputs) > 0
    for tests in (None, {}, {"inputs": ["1"]}, {"inputs": ["1"], "outputs": [1]}, {"inputs": "1", "outputs": ["1"]}):
        with pytest.raises(ValueError, match=r"field 'verifier_metadata\.unit_tests"):
            VERIFIER.parse_task({"verifier_metadata": {"unit_tests": tests}}, VERIFIER.settings())


def test_values_that_json_does_not_have() -> None:
    assert program_harness.value_of((1, 2)) == {"value": [1, 2]}
    assert program_harness.value_of({1, 2}) == {"error": "returned set, which JSON does not have"}
    assert program_harness.value_of(3 + 0j)["error"].startswith("returned complex")

    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    assert "error" in program_harness.value_of(Equal())
