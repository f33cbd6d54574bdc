"""Procedural reasoning tasks of the reasoning-gym library. Reward in [0, 1], as the library's scorer of the task says.

Many scorers give partial credit. Some evaluate the answer as an expression, so scoring runs in a jailed process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from recipes.environments.contract.responses import all_text
from recipes.environments.contract.rows import optional_str, require_str, wrong
from recipes.environments.contract.verdict import Response, Verdict
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One generated question with all that its scorer needs."""

    task_name: str
    entry: str  # JSON of {question, answer, metadata}


def parse_task(row: Row, settings: Mapping[str, Any]) -> Task:
    """Read `question`, `answer` and `metadata.source_dataset`."""
    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping):
        raise wrong("metadata", metadata, "an object")
    name = metadata.get("source_dataset")
    if not isinstance(name, str) or not name:
        raise wrong("metadata.source_dataset", name, "the name of a reasoning-gym task")
    entry = {"question": require_str(row, "question"), "answer": optional_str(row, "answer"), "metadata": metadata}
    return Task(task_name=name, entry=json.dumps(entry))


def score(response: Response, task: Task) -> Verdict:
    """Extract the answer and let the task's own scorer judge it."""
    answer = extract_answer(all_text(response))
    details = {"extracted_answer": answer, "task_name": task.task_name}
    try:
        reward = float(_scorer(task.task_name)(answer, json.loads(task.entry)))
    except Exception as error:  # the scorer cannot read the model's text, which earns no credit
        reason = f"{task.task_name}: the scorer failed: {type(error).__name__}: {error}"[:200]
        return Verdict(reward=0.0, reason=reason, details=details)
    if not math.isfinite(reward):
        return Verdict(reward=0.0, reason=f"{task.task_name}: the scorer returned {reward}", details=details)
    return Verdict(reward=reward, reason=f"{task.task_name}: {answer[:80]!r} scored {reward:.3g}", details=details)


def extract_answer(text: str) -> str:
    """Return the last <answer> block, else the first box up to its first brace, else the whole text."""
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tagged[-1]).strip()
    if boxed := re.search(r"\\boxed\{([^}]+)\}", text):
        return boxed.group(1).strip()
    return text.strip()


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
    imports=("reasoning_gym",),
)
