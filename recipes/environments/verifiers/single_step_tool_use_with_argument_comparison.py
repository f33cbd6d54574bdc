"""The next action of a recorded trajectory: the policy must act as the expert did. Nothing is executed.

Reward 1.0 when the action matches, else 0.0; with `parallel_tool_call_rewarding` a batch may earn a part. Decided as
NeMo Gym's verifier has it, because published rewards depend on it:

* Where the expert answered with text, any text earns 1.0, whatever it says, and any call 0.0. An empty one earns 0.0.
* By default surplus calls cost nothing: every expected call must find a call of its own that matches it.
* A value must have the type of the expected one as Python sees it: true passes for 1, and 1 does not for 1.0. With
  `compare_numbers_by_value` 1 passes for 1.0 and 1.0 for 1, and true is no number.
* Texts of two words and more are compared as bags of words: shared words over the words of both, so that equal texts
  score 0.5. With a threshold of 0 (SWE pivot) any such text matches any other: only the tool, the names and types of
  arguments, and texts of one word decide. Set `word_count_similarity_threshold` higher to compare them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from recipes.environments.contract import (
    Agent,
    Response,
    Row,
    Unit,
    Verdict,
    Verifier,
    function_calls,
    message_texts,
    wrong,
)

STRICT, FRACTIONAL, F1 = "binary_strict", "fractional", "f1"
LARGEST = sys.float_info.max
CHEAP_CALLS, CHEAP_CHARACTERS = 16, 8_000  # expected ones, and of their arguments
RECENT = 256  # expected texts whose words are kept
CONFIG = "tool_call_comparator_config"
NAME = "single_step_tool_use_with_argument_comparison"
THRESHOLDS = {"": 0.1, "toolcall_schema_": 0.1, "search_pivot_": 0.3, "swe_pivot_": 0.0}  # of the published instances


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparator:
    """How the model's action is compared with the expert's."""

    word_count_similarity_threshold: Annotated[float, Ge(0), Le(0.5), Unit("share")]
    """words two texts must share, over the words of both; 0.5 = all of them, 0 = none"""
    floating_point_comparison_threshold: Annotated[float, Ge(0), Unit("difference")] = 1e-6
    """difference below which two numbers are equal"""
    compare_numbers_by_value: bool = False
    """1 is 1.0, and true is no number"""
    parallel_tool_call_rewarding: bool = False
    """count surplus and missing calls of a batch"""
    allow_subset: bool = False
    """then: fewer calls than expected may still score"""
    allow_superset: bool = False
    """then: more calls than expected may still score"""
    parallel_tool_call_reward_mode: Literal["binary_strict", "fractional", "f1"] = "binary_strict"
    """then: all or nothing, the share that matches, or F1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The next action of an expert's trace, compared with the expert's."""

    tool_call_comparator_config: Comparator = Comparator(word_count_similarity_threshold=THRESHOLDS[""])
    """how the model's action is compared with the expert's"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the expert did, and how the policy's action is compared with it."""

    calls: tuple[tuple[str, str], ...]  # (tool, arguments as JSON text); none: the expert answered with text
    threshold: float  # shared words over the words of both texts, in [0, 0.5]
    float_tolerance: float = 1e-6
    counts_batches: bool = False  # a missing or surplus call costs, in one of the ways below
    allows_fewer: bool = False
    allows_more: bool = False
    mode: str = STRICT
    compares_by_value: bool = False  # numbers, whether written as whole ones or not


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `expected_action`, and the comparison from the setting `tool_call_comparator_config`."""
    action = row.get("expected_action")
    kind = action.get("type") if isinstance(action, Mapping) else None
    if not isinstance(action, Mapping) or kind not in ("message", "function_call", "function_call_batch"):
        raise wrong("expected_action", action, "a message, a function_call or a function_call_batch")
    calls = action.get("calls") if kind == "function_call_batch" else [action] if kind == "function_call" else []
    if not isinstance(calls, list) or (kind == "function_call_batch" and not calls):
        raise wrong("expected_action.calls", calls, "a list of at least one call")
    config = settings.tool_call_comparator_config
    return Task(
        calls=tuple(_expected(call) for call in calls),
        threshold=config.word_count_similarity_threshold,
        float_tolerance=config.floating_point_comparison_threshold,
        counts_batches=config.parallel_tool_call_rewarding,
        allows_fewer=config.allow_subset,
        allows_more=config.allow_superset,
        mode=config.parallel_tool_call_reward_mode,
        compares_by_value=config.compare_numbers_by_value,
    )


def _expected(call: object) -> tuple[str, str]:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise wrong("expected_action", call, "a call with a name")
    arguments = call.get("arguments")
    if not isinstance(arguments, str) or _parsed(arguments) is UNREADABLE:
        raise wrong("expected_action.arguments", arguments, "JSON text")
    return call["name"], arguments


UNREADABLE = object()  # arguments that are no JSON


def _parsed(arguments: object) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else UNREADABLE
    except (ValueError, RecursionError):
        return UNREADABLE


def score(response: Response, task: Task) -> Verdict:
    """Compare the action in the response with the expert's."""
    calls = function_calls(response)
    if not calls and not message_texts(response):
        return Verdict(reward=0.0, reason="the response holds neither a call nor a message")
    if not task.calls:
        is_said = any(re.search(r"\w", text) for text in message_texts(response))
        reason = "a call, expected a message" if calls else "a message, as expected" if is_said else "an empty message"
        return Verdict(reward=float(is_said and not calls), reason=reason)
    if not calls:
        return Verdict(reward=0.0, reason=f"a message, expected {len(task.calls)} calls")
    expected = [(name, _parsed(arguments)) for name, arguments in task.calls]
    actual = [(call.get("name"), _parsed(call.get("arguments"))) for call in calls]
    edges = [[_problem(wanted, found, task) for found in actual] for wanted in expected]
    matched = _matched([[problem is None for problem in row] for row in edges])
    reward = _reward(matched, len(expected), len(actual), task)
    counts = f"{matched} of {len(expected)} expected calls matched by {len(actual)}"
    problem = next((problem for problem in edges[0] if problem is not None), None)
    return Verdict(reward=reward, reason=counts if reward == 1.0 or not problem else f"{counts}; {problem}"[:200])


def _reward(matched: int, num_expected: int, num_actual: int, task: Task) -> float:
    if not task.counts_batches:
        return float(matched == num_expected)
    if (num_actual < num_expected and not task.allows_fewer) or (num_actual > num_expected and not task.allows_more):
        return 0.0
    if task.mode == FRACTIONAL:
        required = min(num_expected, num_actual) if task.allows_fewer else num_expected
        return matched / required
    if task.mode == F1:
        return 2 * matched / (num_expected + num_actual)
    return float(matched == min(num_expected, num_actual))


def _matched(edges: Sequence[Sequence[bool]]) -> int:
    """Return the size of a largest matching of expected (rows) to actual calls (columns), by augmenting paths."""
    owner: dict[int, int] = {}
    return sum(_is_placed(row, edges, owner) for row in range(len(edges)))


def _is_placed(row: int, edges: Sequence[Sequence[bool]], owner: dict[int, int]) -> bool:
    """Give a row a column, where need be by moving others; `owner` is who has each column. Breadth first."""
    reached: dict[int, int] = {}  # column -> the row from which it was reached
    rows = deque([row])
    while rows:
        current = rows.popleft()
        for column, fits in enumerate(edges[current]):
            if not fits or column in reached:
                continue
            reached[column] = current
            if column in owner:
                rows.append(owner[column])
                continue
            place = column
            while True:
                giver = reached[place]
                before = next((taken for taken, who in owner.items() if who == giver), None)
                owner[place] = giver
                if before is None or giver == row:
                    return True
                place = before
    return False


def _problem(wanted: tuple[str, Any], found: tuple[Any, Any], task: Task) -> str | None:
    """Return how an actual call differs from an expected one, None when it matches."""
    if found[0] != wanted[0]:
        return f"called {str(found[0])[:60]}, expected {wanted[0]}"
    if found[1] is UNREADABLE:
        return "the arguments are no JSON"
    return _difference(wanted[1], found[1], task)


def _difference(wanted: Any, found: Any, task: Task) -> str | None:
    """Return the first difference, in order. Arguments may be nested deeper than calls of functions may be."""
    left = [(wanted, found)]
    while left:
        inner = _compared(*left.pop(), task)
        if isinstance(inner, str):
            return inner
        left += reversed(inner)
    return None


def _compared(wanted: Any, found: Any, task: Task) -> str | list[tuple[Any, Any]]:
    """Return how two values differ, or the pairs of values in them that are left to compare."""
    if not _has_type_of(wanted, found, task):
        return f"a value of type {type(found).__name__}, expected {type(wanted).__name__}"
    if isinstance(wanted, dict):
        if wanted.keys() != found.keys():
            return f"the keys differ from {sorted(wanted)}"
        return [(wanted[key], found[key]) for key in wanted]
    if isinstance(wanted, list):
        if len(wanted) != len(found):
            return f"a list of {len(found)}, expected {len(wanted)}"
        return list(zip(wanted, found, strict=True))
    return [] if _same(wanted, found, task) else f"the value {str(found)[:60]!r}, expected {str(wanted)[:60]!r}"


def _has_type_of(wanted: Any, found: Any, task: Task) -> bool:
    if not task.compares_by_value:
        return isinstance(found, type(wanted))
    if isinstance(wanted, bool) or isinstance(found, bool):
        return type(wanted) is type(found)
    return isinstance(found, int | float if isinstance(wanted, int | float) else type(wanted))


def _same(wanted: Any, found: Any, task: Task) -> bool:
    if isinstance(wanted, float):
        is_small = isinstance(found, float) or abs(found) < LARGEST  # a larger whole number is no float
        return is_small and bool(abs(wanted - found) < task.float_tolerance)
    if not isinstance(wanted, str):
        return bool(wanted == found)
    ours, theirs = _bag(wanted), Counter(found.lower().split())
    sizes = ours.total(), theirs.total()
    if min(sizes) < 2:
        return bool(wanted == found)
    shared = sum(min(count, ours[word]) for word, count in theirs.items())
    return bool(shared / sum(sizes) >= task.threshold)


@lru_cache(maxsize=RECENT)
def _bag(text: str) -> Counter[str]:
    """Return how often each word stands in an expected text, which is compared with one of every call."""
    return Counter(text.lower().split())


def _is_cheap(task: Task) -> bool:
    """Whether an answer of many calls is compared with the expected ones in little time."""
    return len(task.calls) <= CHEAP_CALLS and sum(len(text) for _, text in task.calls) <= CHEAP_CHARACTERS


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="SingleStepToolUseArgumentComparisonResourcesServer",
    agents={
        f"{stem}{NAME}_agent": Agent(kind="single_turn", server=f"{stem}{NAME}_resources_server") for stem in THRESHOLDS
    },
    servers={
        f"{stem}{NAME}_resources_server": {CONFIG: {"word_count_similarity_threshold": threshold}}
        for stem, threshold in THRESHOLDS.items()
    },
    settings=Settings,
    is_cheap=_is_cheap,
    exempt=lambda task: {} if task.calls else {"any text": "the expert answered with text, which is not compared"},
)
