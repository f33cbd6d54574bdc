"""One turn at a terminal: the keystrokes that a recorded expert sent next. Reward 1.0 for exactly these, else 0.0.

The answer is one JSON object in the format of the row's harness, after the last `</think>`. Nothing is executed.

Kept from the reference: keys that a format does not have are refused, an empty list of commands matches an empty one,
and where the expert says that the task is complete the answer must say so, too; saying it too early costs nothing.

Decided otherwise: keystrokes are compared as the reference's description and tests say, one by one and exactly; its
code pays the likeness of all keystrokes put together. A row with a `threshold` pays 1.0 from that likeness on. A row
whose expected answer cannot be read, has no `commands` or one without keystrokes, or whose harness has no format, is
refused: nobody knows what should have been sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from recipes import exact_json
from recipes.environments.contract import (
    EXPRESSION_CHARACTERS,
    Response,
    Row,
    Verdict,
    Verifier,
    message_texts,
    one_of,
    optional_object,
    optional_str,
    require_str,
    wrong,
)

NUMBER = (int, float)
THINK_END = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The keys of an answer and of its commands, each with its types; those of `may_lack` need not be there."""

    answer: Mapping[str, tuple[type, ...]]
    command: Mapping[str, tuple[type, ...]]
    complete: str  # the key that says whether the task is complete
    may_lack: frozenset[str] = frozenset()


FORMATS = {
    "terminus_1": Format(
        answer={"state_analysis": (str,), "explanation": (str,), "commands": (list,), "is_task_complete": (bool,)},
        command={"keystrokes": (str,), "is_blocking": (bool,), "timeout_sec": NUMBER},
        complete="is_task_complete",
    ),
    "terminus_2": Format(
        answer={"analysis": (str,), "plan": (str,), "commands": (list,), "task_complete": (bool,)},
        command={"keystrokes": (str,), "duration": NUMBER},
        complete="task_complete",
        may_lack=frozenset({"task_complete", "duration"}),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the expert sent, and in which format the answer is written."""

    harness: str
    keystrokes: tuple[str, ...]
    must_be_complete: bool
    threshold: float | None


def parse_task(row: Row, settings: Any) -> Task:
    """Read `expected_answer`, here or in `metadata`, `metadata.harness` and `threshold`."""
    metadata = optional_object(row, "metadata")
    harness = one_of("metadata.harness", metadata.get("harness"), FORMATS)
    text = optional_str(row, "expected_answer") or require_str(metadata, "expected_answer")
    expected = _read(text) or {}
    commands = expected.get("commands")
    if not isinstance(commands, list) or not all(_is_command(command) for command in commands):
        raise wrong("expected_answer", text, "a JSON object whose `commands` are a list of objects with `keystrokes`")
    threshold = row.get("threshold")
    is_number = isinstance(threshold, NUMBER) and not isinstance(threshold, bool)
    if threshold is not None and not (is_number and 0.0 < threshold <= 1.0):
        raise wrong("threshold", threshold, "a number above 0, at most 1")
    return Task(
        harness=harness,
        keystrokes=tuple(command["keystrokes"] for command in commands),
        must_be_complete=bool(expected.get("task_complete") or expected.get("is_task_complete")),
        threshold=threshold,
    )


def _is_command(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("keystrokes"), str)


def is_cheap(task: Task) -> bool:
    """Return whether texts are only compared for being equal; likeness takes the square of their length."""
    return task.threshold is None


def score(response: Response, task: Task) -> Verdict:
    """Compare the keystrokes of the answer with the expert's."""
    text = "\n".join(message_texts(response)).strip()
    answer = _read(text.rpartition(THINK_END)[2].strip())
    if answer is None:
        return Verdict(reward=0.0, reason="the answer is no JSON object")
    own = FORMATS[task.harness]
    if fault := _fault(answer, own.answer, own) or _fault_of_commands(answer["commands"], own):
        return Verdict(reward=0.0, reason=f"not in the format {task.harness}: {fault}")
    if task.must_be_complete and not answer.get(own.complete):
        return Verdict(reward=0.0, reason=f"{own.complete} is not said of a task that is complete")
    sent = tuple(command["keystrokes"] for command in answer["commands"])
    if task.threshold is None or sent == task.keystrokes:
        is_right = sent == task.keystrokes
        return Verdict(reward=float(is_right), reason="the expert's keystrokes" if is_right else "other keystrokes")
    likeness = _likeness("".join(task.keystrokes), "".join(sent))
    return Verdict(reward=float(likeness >= task.threshold), reason=f"likeness of the keystrokes {likeness:.3f}")


def _read(text: str) -> Mapping[str, Any] | None:
    """Return the object that a text is, None for any other text."""
    try:
        value = exact_json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _fault(value: Any, keys: Mapping[str, tuple[type, ...]], own: Format) -> str:
    """Return what is wrong with the keys of an object; "" for nothing."""
    if not isinstance(value, dict):
        return "a command that is no object"
    if further := sorted(value.keys() - keys.keys()):
        return f"a key {further[0][:40]!r}"
    for name, kinds in keys.items():
        if name not in value:
            if name not in own.may_lack:
                return f"no {name}"
        elif not isinstance(value[name], kinds) or (isinstance(value[name], bool) and bool not in kinds):
            return f"{name} of another type"
    return ""


def _fault_of_commands(commands: list[Any], own: Format) -> str:
    return next((fault for command in commands if (fault := _fault(command, own.command, own))), "")


def _likeness(expected: str, sent: str) -> float:
    """Return how much two texts are alike, 0 to 1; one that is too long to compare is not like another."""
    if not expected or not sent or len(sent) > EXPRESSION_CHARACTERS:
        return float(expected == sent)
    return SequenceMatcher(None, expected, sent).ratio()


VERIFIER = Verifier(task=Task, parse_task=parse_task, score=score, class_name="TBResourcesServer", is_cheap=is_cheap)
