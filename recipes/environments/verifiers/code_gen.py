"""Programs for problems with unit tests. Reward 1.0 when a program passes every test, else 0.0.

The program is what stands between the last two lines with three backticks; an answer whose last fence is not closed
gives other lines than it means. With the setting `close_last_fence` such an answer ends with its program. It runs in a
sandbox (`checks/program_harness.py` says what it finds there), which is sent the inputs of the tests and never what
they expect; the comparison happens here. The tests go in growing batches, each in a process of its own, so that a wrong
program stops early.

A program that fails, waits for ever, floods its output or breaks its process earns 0; so does one that uses more
processor time than a test allows. A sandbox that does not start it gives no verdict, nor does one that ends it before
it has used its time: the machine was busy. Kept from the reference, because rewards depend on it:

* The answer earns `reasoning_format_penalty` in place of its reward when a thinking tag stands in its text, or one of
  the tags more than once in its reasoning. Its program is then not run.
* A row without tests rewards every program that Python accepts. A test whose values are no JSON, in a row that calls a
  function, cannot be passed.

Other than there, a program that reads its input runs as Python runs it, in a process of its own for each test.

Comparison of what a program answered with what its test expects, by the rules of LiveCodeBench's harness.

Both sides arrive here as data, in a process that runs no program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from recipes.environments.contract import (
    Execution,
    Response,
    Row,
    Scoring,
    Unit,
    Verdict,
    Verifier,
    all_text,
    optional_object,
    optional_str,
    output_items,
    wrong,
)
from recipes.environments.verifiers.checks import program_harness

RELATIVE, ABSOLUTE = 1e-5, 1e-8  # numpy.allclose


def is_same_output(printed: str, expected: str) -> bool:
    """Return whether two texts have equal lines, spaces around them aside; lines of numbers are compared by value."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_is_same_line, ours, theirs))


def is_same_value(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal, have equal JSON texts, or are numbers, also as text, that are close."""
    try:
        if value == expected or json.dumps(value) == json.dumps(expected):
            return True
        number, other = float(value), float(expected)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return number == other or abs(number - other) <= ABSOLUTE + RELATIVE * abs(other) < math.inf


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        return [Decimal(word) for word in ours.split()] == [Decimal(word) for word in theirs.split()]
    except (ArithmeticError, ValueError):
        return False


HARNESS = Path(program_harness.__file__).read_text(encoding="utf-8")
FENCE = "```"
TAGS = ("<think>", "</think>")
BATCH_GROWTH = 4  # 1 test, then 4, then 16
START_SECONDS = 5.0  # to start Python in a sandbox that is busy
OWN_START_SECONDS = 1.0  # of these, that Python uses
BATCH_CHARACTERS = 600_000  # of the inputs and outputs of a batch of several tests
MAX_CHARACTERS = 5_000_000  # of a batch's answers, beside those of a test that expects more
ESCAPED = 6  # characters that JSON may write for one
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A program for a problem, run against unit tests."""

    num_processes: Annotated[int, Ge(1), Unit("processes")] = 1024
    """programs that run at once"""
    unit_test_timeout_secs: Annotated[float, Gt(0), Unit("seconds")] = 10.0
    """limit of one unit test"""
    reasoning_format_penalty: Annotated[float, Unit("reward")] = 0.0
    """reward of an answer with stray thinking tags, whatever its tests say"""
    close_last_fence: bool = False
    """an answer whose last block of code is not closed ends with its program"""
    debug: bool = False
    """log every program; the native engine does not"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The tests of one problem."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fn_name: str | None  # what is called; None = the program reads standard input
    seconds: float  # of processor time, for one test
    format_reward: float  # of an answer with misplaced thinking tags
    closes_fence: bool = False


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `verifier_metadata.unit_tests`; of lists of different lengths the surplus is left out."""
    tests = optional_object(row, "verifier_metadata").get("unit_tests")
    if not isinstance(tests, Mapping):
        raise wrong("verifier_metadata.unit_tests", tests, "an object")
    inputs, outputs = (_texts(tests, name) for name in ("inputs", "outputs"))
    longest = max(map(len, outputs), default=0)
    if longest > program_harness.MAX_OUTPUT_CHARACTERS:  # no answer could pass it
        most = f"at most {program_harness.MAX_OUTPUT_CHARACTERS} characters in each"
        raise wrong("verifier_metadata.unit_tests.outputs", longest, most)
    count = min(len(inputs), len(outputs))
    return Task(
        inputs=inputs[:count],
        outputs=outputs[:count],
        fn_name=optional_str(tests, "fn_name"),
        seconds=settings.unit_test_timeout_secs,
        format_reward=settings.reasoning_format_penalty,
        closes_fence=settings.close_last_fence,
    )


def score(response: Response, task: Task) -> Verdict | Scoring:
    """Run the program of an answer on the tests."""
    code = program_in(all_text(response), closes_fence=task.closes_fence)
    if code is None:
        return Verdict(reward=0.0, reason="no program: fewer than two lines with three backticks, or nothing between")
    if has_misplaced_tags(response):
        reason = "a thinking tag in the text, or twice in the reasoning"
        return Verdict(reward=task.format_reward, reason=reason, metrics={"reasoning_format_violation": 1.0})
    return _score_by_running(code, task)


def program_in(text: str, *, closes_fence: bool = False) -> str | None:
    """Return the lines between the last two that hold three backticks, None when there are none.

    With `closes_fence` those after the last one count where it opens a block, being the first, the third, ...
    """
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if FENCE in line]
    if closes_fence and len(fences) % 2:
        fences.append(len(lines))
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) or None if len(fences) > 1 else None


def has_misplaced_tags(response: Response) -> bool:
    """Return whether a thinking tag is in the text, or the same one more than once in the reasoning."""
    text = all_text(response)
    parts = [
        part.get("text")
        for item in output_items(response)
        if item.get("type") == "reasoning" and isinstance(item.get("summary"), list)
        for part in item["summary"]
        if isinstance(part, Mapping)
    ]
    reasoning = "".join(part for part in parts if isinstance(part, str))
    return any(tag in text or reasoning.count(tag) > 1 for tag in TAGS)


def _score_by_running(code: str, task: Task) -> Scoring:
    total, start, size = len(task.inputs), 0, 1
    while True:
        size = _fitting(task, start, size)
        inputs = task.inputs[start : start + size]
        num_expected = sum(map(len, task.outputs[start : start + size]))
        (reply,) = yield [_execution(code, inputs, task, num_expected)]
        answers = _answers(reply)
        if not inputs and answers:  # the definitions of the program failed
            return _failed(code, f"without a test: {_problem(answers[0], '', task)}", 0)
        for number, expected in enumerate(task.outputs[start : start + size]):
            answer = answers[number] if number < len(answers) else {"error": _end_of(reply, len(inputs), task)}
            if problem := _problem(answer, expected, task):
                return _failed(code, f"test {start + number + 1} of {total}: {problem}", start + number)
        start, size = start + len(inputs), size * BATCH_GROWTH
        if start == total:
            return Verdict(
                reward=1.0,
                reason=f"passes all {total} tests",
                metrics={"tests_passed": float(total)},
                details={"extracted_model_code": code},
            )


def _fitting(task: Task, start: int, most: int) -> int:
    """Return how many tests from one on make a batch that is not too long: at most so many, and at least one."""
    characters = 0
    for size, test in enumerate(range(start, min(start + most, len(task.inputs)))):
        characters += len(task.inputs[test]) + len(task.outputs[test])
        if size and characters > BATCH_CHARACTERS:
            return size
    return most


def _failed(code: str, reason: str, passed: int) -> Verdict:
    metrics = {"tests_passed": float(passed)}
    return Verdict(reward=0.0, reason=reason, metrics=metrics, details={"extracted_model_code": code})


def _execution(code: str, inputs: Sequence[str], task: Task, num_expected: int) -> Execution:
    """Return the run of a program on some tests, which together expect so many characters."""
    request = {"code": code, "inputs": inputs, "fn_name": task.fn_name, "seconds": task.seconds}
    return Execution(
        language="python3",
        code=HARNESS,
        stdin=json.dumps(request),
        seconds=START_SECONDS + (program_harness.CLOCK_FACTOR * task.seconds + 1) * (len(inputs) + 1),
        max_characters=max(MAX_CHARACTERS, ESCAPED * num_expected + MAX_CHARACTERS // 2),
    )


def _answers(reply: Response) -> list[Any]:
    """Return the harness's lines after its first; raises `RuntimeError` when it did not get to run the program."""
    first, *rest = str(reply.get("stdout") or "").split("\n")
    if first != json.dumps({"ready": True}):
        said = str(reply.get("stderr") or reply.get("stdout") or "nothing")
        raise RuntimeError(f"the sandbox did not start the program: it said {said[-SHOWN_CHARACTERS:]!r}")
    answers = []
    for line in rest[:-1]:  # what follows the last end of a line was cut
        try:
            answers.append(json.loads(line))
        except (ValueError, RecursionError):
            answers.append(None)
    return answers


def _problem(answer: Any, expected: str, task: Task) -> str:
    """Return what is wrong with the answer to one test, "" when it is right."""
    if not isinstance(answer, Mapping):
        return "the program broke its report"
    if "time" in answer:
        return f"more than {task.seconds:g} s"
    if "error" in answer:
        return str(answer["error"]).encode(errors="replace").decode()[:SHOWN_CHARACTERS]  # half a surrogate pair
    if task.fn_name is None:
        return "" if is_same_output(str(answer.get("output", "")), expected) else "wrong output"
    try:
        wanted = json.loads(expected)
    except (ValueError, RecursionError):
        return "what the row expects is no JSON"
    return "" if is_same_value(answer.get("value", answer.get("number")), wanted) else "wrong value"


def _end_of(reply: Response, num_tests: int, task: Task) -> str:
    """Return how a run ended that left out answers; raises `RuntimeError` when it lacked the processor."""
    if reply.get("process_status") == "timeout":
        most = OWN_START_SECONDS + program_harness.OWN_FACTOR * task.seconds * (num_tests + 1)
        used = float(reply.get("used_seconds") or 0.0)
        if used < most:  # else the harness would have ended it, but for the program
            raise RuntimeError(f"a busy machine: the program had {used:g} s of the {most:g} s that it may use")
        return "no end within its time"
    return f"the program ended its process: {str(reply.get('stderr') or 'silently').strip()[-SHOWN_CHARACTERS:]}"


def _texts(tests: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = tests.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise wrong(f"verifier_metadata.unit_tests.{name}", values, "a list of strings")
    return tuple(values)


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="CompCodingResourcesServer",
    rewards=(-1.0, 1.0),
    settings=Settings,
    needs_sandbox=True,
)
