"""Mathematics with a known answer, checked symbolically. Reward 1.0 when equal, else 0.0.

math-verify reads the gold answer as LaTeX, and the response as LaTeX and as plain expressions. NeMo Gym also asks a
judge model when the symbolic check fails; a row or a setting that wants this judge is refused until it is built.

Scoring must run in the main thread of a process, for math-verify bounds its time with SIGALRM.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.environments.contract.responses import all_text
from recipes.environments.contract.rows import require_str
from recipes.environments.contract.verdict import Response, Verdict
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question's known answer."""

    expected_answer: str


def parse_task(row: Row, settings: Mapping[str, Any]) -> Task:
    """Read `question` and `expected_answer`."""
    if settings.get("should_use_judge"):
        raise ValueError("setting 'should_use_judge': got true, expected false; the judge is not built yet")
    require_str(row, "question")
    return Task(expected_answer=require_str(row, "expected_answer"))


def score(response: Response, task: Task) -> Verdict:
    """Compare the response with the expected answer symbolically."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify bounds its time with SIGALRM and must run in the main thread of a process")
    text = all_text(response)
    if not text.strip():
        return _verdict(0.0, "the answer is empty", None)
    try:
        is_equal, extracted = _compare(text, task.expected_answer)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's timeout is a BaseException; model text must not stop a run
        return _verdict(0.0, f"the symbolic check failed: {type(error).__name__}: {error}"[:200], None)
    if extracted is None:
        return _verdict(0.0, "no answer could be extracted", None)
    verb = "equals" if is_equal else "differs from"
    return _verdict(float(is_equal), f"{extracted[:80]} {verb} {task.expected_answer[:80]}", extracted)


def _verdict(reward: float, reason: str, extracted: str | None) -> Verdict:
    return Verdict(
        reward=reward,
        reason=reason,
        metrics={"library_reward": reward},
        details={"extracted_answer": extracted},
    )


def boxed_gold(expected: str) -> str:
    """Return the expected answer without one pair of outer math delimiters, boxed."""
    gold = expected.strip()
    for opening, closing in (("\\(", "\\)"), ("$", "$")):
        if gold.startswith(opening) and gold.endswith(closing) and len(gold) >= len(opening) + len(closing):
            gold = gold[len(opening) : len(gold) - len(closing)].strip()
    return f"\\boxed{{{gold}}}"


WARM_UP = (
    "\\frac{1}{2}",
    "x^2+\\sqrt{3}",
    "(1, 2]",
    "\\{1,2\\}",
    "-3.5",
    "x=5\\pi",
    "10\\%",
    "2\\cdot 10^{-3}",
    "\\sin(x)",
)


def prepare(_kind: str) -> None:
    """Read some constant answers: math-verify's parser builds its tables as it meets new notation, which is slow."""
    for text in WARM_UP:
        _compare(f"So the answer is \\boxed{{{text}}} or ${text}$ or {text}.", text)


def _compare(text: str, expected: str) -> tuple[bool, str | None]:
    """Return whether any extracted prediction equals the gold answer, and the prediction that decided."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    predictions = parse(text, (ExprExtractionConfig(), LatexExtractionConfig()))
    golds = parse(boxed_gold(expected), (LatexExtractionConfig(),))
    if not golds:
        raise ValueError(f"the expected answer {expected!r} cannot be read")
    for prediction in predictions:
        if any(verify(gold, prediction) for gold in golds):
            return True, str(prediction)
    return False, str(predictions[0]) if predictions else None


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="LibraryJudgeMathResourcesServer",
    rewards=(0.0, 1.0),
    agents={"math_with_judge_simple_agent": Agent(kind="single_turn", server="math_with_judge")},
    settings=frozenset({"should_use_judge"}),
    imports=("math_verify",),
    prepare=prepare,
)
