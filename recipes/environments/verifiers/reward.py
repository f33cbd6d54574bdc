"""A reward of your own: what `score(response, row)` of a Python file returns, a number up to a million in size.

    def score(response: str, row: dict) -> float:
        return float(response.strip() == str(row["expected_answer"]))

`response` is the text of the answer, without its reasoning; `row` is the whole row. The function may return a
`Verdict`, which says why, or be `async` as long as it waits for nothing: it runs in a scoring process, where no file,
network or other process is to be had. What it raises, and what is no such number, is no verdict with its line.
`REWARD=my_reward.py ROWS=my.jsonl` of `make stage1.1` sets the file.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from recipes.environments.contract import Response, Row, Text, Verdict, Verifier, last_message_text, named_file

FUNCTION = "score"
MAX_REWARD = 1e6  # as of a verifier elsewhere: the squares of much larger ones are not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A reward of your own."""

    file: Text | None = None
    """Python file with `score(response, row)`, relative to the checkout; null = none: rows of this agent are refused"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row, and the program that scores its answers."""

    source: str
    file: str  # whose text `source` is
    row: str  # as JSON


class RewardError(Exception):
    """The program gave no reward; the message says where and why."""


def parse_task(row: Row, settings: Settings) -> Task:
    """Take the whole row."""
    if settings.file is None:
        raise ValueError("agent 'reward_simple_agent' has no reward: give REWARD=my_reward.py")
    file = str(named_file(settings.file))
    return Task(source=source_of(file), file=file, row=json.dumps(row))


@functools.cache
def source_of(file: str) -> str:
    """Return the text of a reward's file; raises `ValueError` for one that cannot be read or has no `score`."""
    try:
        source = Path(file).read_text(encoding="utf-8")
        function_of(source, file)
    except (OSError, ValueError) as error:
        raise ValueError(f"reward {file}: {error}") from error
    except RewardError as error:
        raise ValueError(str(error)) from error
    return source


@functools.cache
def function_of(source: str, file: str) -> Callable[[str, Row], Any]:
    """Return the function of a reward's program; raises `RewardError` for one that cannot be run or has no `score`."""
    module = ModuleType(f"own_reward_{len(sys.modules)}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses look for it
    try:  # it is the operator's program, as the verifiers of this folder are
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise RewardError(_where(file, error)) from error
    found: Callable[[str, Row], Any] | None = getattr(module, FUNCTION, None)
    if not callable(found):
        raise RewardError(f"{file}: it defines no function {FUNCTION}(response, row)")
    return found


def score(response: Response, task: Task) -> Verdict:
    """Call the function of the file with the answer's text and the row."""
    function, row = function_of(task.source, task.file), json.loads(task.row)
    try:
        found = _finished(function(last_message_text(response), row))
    except (Exception, SystemExit) as error:
        raise RewardError(_where(task.file, error)) from error
    if isinstance(found, Verdict):
        return found
    try:
        reward = float(found)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{task.file}: {FUNCTION} returned {found!r:.60}, expected a number or a Verdict") from error
    if not abs(reward) <= MAX_REWARD:  # NaN is not, either
        raise RewardError(
            f"{task.file}: {FUNCTION} returned {reward}, expected a number, at most {MAX_REWARD:g} in size"
        )
    return Verdict(reward=reward, reason=f"{Path(task.file).name} returned {reward:g}")


def _finished(found: Any) -> Any:
    """Return what an async function returns; one that waits for something cannot go on here."""
    if not inspect.iscoroutine(found):
        return found
    try:
        found.send(None)
    except StopIteration as done:
        return done.value
    found.close()
    raise RuntimeError("it waits for something, and there is nothing to wait for in a scoring process")


def _where(file: str, error: BaseException) -> str:
    """Return an error with the last line of the file in which it arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    lines = lines or [error.lineno] if isinstance(error, SyntaxError) else lines
    line = f", line {lines[-1]}" if lines and lines[-1] else ""
    return f"{file}{line}: {type(error).__name__}: {error}"


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    settings=Settings,
    files=lambda settings: {} if settings.file is None else {"file": settings.file},
    rewards=(-MAX_REWARD, MAX_REWARD),
)
