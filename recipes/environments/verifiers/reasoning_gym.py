"""Procedural reasoning tasks of the reasoning-gym library. Reward in [0, 1], as the library's scorer of the task says.

Many scorers give partial credit. Some families evaluate text as Python or SymPy (EVALUATED): there, an answer that is
no literal or plain expression is replaced by one that no parser reads, so that the scorer rates it as nonsense, and a
row whose own text is neither has no verdict. In addition, everything runs in a jailed process.

Kept from the reference, because rewards depend on it: a board of BOARDS is never right, and earns 0.05. It comes out of
a row as lists, and the scorer compares it with tuples. With the setting `compare_boards` a right one earns 1.0.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from recipes.environments.checks.expressions import is_expression, is_literal
from recipes.environments.contract.responses import all_text
from recipes.environments.contract.rows import optional_str, require_str, wrong
from recipes.environments.contract.verdict import Response, Verdict
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.types import Row

NONSENSE = "="  # neither Python nor SymPy reads it
BOARDS = ("arc_agi", "rearc")
ROUNDING = 1e-9  # by which a sum of parts may come out above 1 (`spell_backward`)


def _is_formula(text: str) -> bool:
    functions = importlib.import_module("sympy.functions")
    return is_expression(text, {*functions.__all__, "Float", "Integer", "Rational"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What a family's scorer evaluates, and what text it may be given."""

    is_safe: Callable[[str], bool]
    evaluates_answer: bool = True
    compares_first: bool = False  # an answer that equals a known one is not evaluated
    row_texts: tuple[str, ...] = ()  # fields of the row or its metadata that the scorer evaluates as well


EVALUATED: Mapping[str, Evaluated] = {
    "binary_matrix": Evaluated(is_safe=is_literal, compares_first=True),
    "bitwise_arithmetic": Evaluated(is_safe=is_literal, evaluates_answer=False, row_texts=("problem",)),
    "countdown": Evaluated(is_safe=_is_formula),
    "intermediate_integration": Evaluated(is_safe=_is_formula, row_texts=("integrand",)),
    "n_queens": Evaluated(is_safe=is_literal, compares_first=True),
    "number_sorting": Evaluated(is_safe=is_literal, evaluates_answer=False, row_texts=("answer",)),
    "polynomial_multiplication": Evaluated(is_safe=_is_formula, row_texts=("answer",)),
    "puzzle24": Evaluated(is_safe=_is_formula),
    "simple_integration": Evaluated(is_safe=_is_formula, row_texts=("integrand",)),
    "spiral_matrix": Evaluated(is_safe=is_literal, compares_first=True),
    "string_insertion": Evaluated(is_safe=is_literal, compares_first=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One generated question with all that its scorer needs."""

    task_name: str
    entry: str  # JSON of {question, answer, metadata}
    compares_boards: bool = False


def parse_task(row: Row, settings: Mapping[str, Any]) -> Task:
    """Read `question`, `answer` and `metadata.source_dataset`."""
    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping):
        raise wrong("metadata", metadata, "an object")
    name = metadata.get("source_dataset")
    if not isinstance(name, str) or not name:
        raise wrong("metadata.source_dataset", name, "the name of a reasoning-gym task")
    entry = {"question": require_str(row, "question"), "answer": optional_str(row, "answer"), "metadata": metadata}
    return Task(task_name=name, entry=json.dumps(entry), compares_boards=bool(settings.get("compare_boards", False)))


def score(response: Response, task: Task) -> Verdict:
    """Extract the answer and let the task's own scorer judge it.

    Raises what the library raises where it cannot build a scorer: an installation that is broken gives no verdict.
    """
    answer = extract_answer(all_text(response))
    details = {"extracted_answer": answer, "task_name": task.task_name}
    entry = json.loads(task.entry)
    board = entry["metadata"].get("output")
    if task.compares_boards and task.task_name in BOARDS and isinstance(board, list):
        entry["metadata"]["output"] = tuple(tuple(line) if isinstance(line, list) else line for line in board)
    graded = answer if _may_be_evaluated(answer, task.task_name, entry) else NONSENSE
    if not _is_known(task.task_name):  # as Gym's server answers
        return Verdict(reward=0.0, reason=f"{task.task_name}: the library has no such task", details=details)
    scorer = _scorer(task.task_name)
    try:
        reward = float(scorer(graded, entry))
    except Exception as error:  # the scorer cannot read the model's text, which earns no credit
        reason = f"{task.task_name}: the scorer failed: {type(error).__name__}: {error}"[:200]
        return Verdict(reward=0.0, reason=reason, details=details)
    if not math.isfinite(reward):
        return Verdict(reward=0.0, reason=f"{task.task_name}: the scorer returned {reward}", details=details)
    reward = min(reward, 1.0) if reward <= 1.0 + ROUNDING else reward
    return Verdict(reward=reward, reason=f"{task.task_name}: {answer[:80]!r} scored {reward:.3g}", details=details)


def _may_be_evaluated(answer: str, task_name: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a family's scorer may see the answer; raises `ValueError` when it must not see the row."""
    family = EVALUATED.get(task_name)
    if family is None:
        return True
    for key in family.row_texts:
        text = entry["metadata"].get(key) if key in entry["metadata"] else entry.get(key)
        if isinstance(text, str) and not family.is_safe(text):
            raise ValueError(f"field '{key}': {text[:80]!r} is not safe to evaluate")
    known = entry["metadata"].get("valid_answers")
    is_known = answer == str(entry["answer"]).strip() or (isinstance(known, list) and answer in known)
    if family.compares_first and is_known:
        return True  # the scorer compares it, and evaluates nothing
    return not family.evaluates_answer or family.is_safe(answer)


def prepare(task_name: str) -> None:
    """Build the scorer of a family of tasks, which reads data files for some."""
    if task_name and _is_known(task_name):
        _scorer(task_name)


def extract_answer(text: str) -> str:
    """Return the last <answer> block, else the first box up to its first brace, else the whole text."""
    tagged = list(_between(text, "<answer>", "</answer>"))
    if tagged:
        return tagged[-1].strip()
    return next((boxed for boxed in _between(text, "\\boxed{", "}") if boxed), text).strip()


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield what stands between an opening and the next closing, in order, in time linear in the text."""
    at = text.find(opening)
    while at >= 0 and (end := text.find(closing, at + len(opening))) >= 0:
        yield text[at + len(opening) : end]
        at = text.find(opening, end + len(closing))


def _is_known(name: str) -> bool:
    from reasoning_gym.factory import DATASETS

    return name in DATASETS


@lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(name)
    return scorer


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="ReasoningGymResourcesServer",
    rewards=(0.0, 1.0),
    agents={"reasoning_gym_simple_agent": Agent(kind="single_turn", server="reasoning_gym")},
    settings=frozenset({"compare_boards"}),
    imports=("reasoning_gym",),
    kind_of=lambda task: task.task_name,
    prepare=prepare,
)
