"""The next action of a recorded trajectory: the policy must act as the expert did. Nothing is executed.

Reward 1.0 when the action matches, else 0.0; with `parallel_tool_call_rewarding` a batch may earn a part. Decided as
NeMo Gym's verifier has it, because published rewards depend on it:

* Where the expert answered with text, any text earns 1.0, whatever it says, and any call 0.0.
* By default surplus calls cost nothing: every expected call must find a call of its own that matches it.
* A value must have the type of the expected one as Python sees it: true passes for 1, and 1 does not for 1.0. With
  `compare_numbers_by_value` 1 passes for 1.0 and 1.0 for 1, and true is no number.
* Texts of two words and more are compared as bags of words: shared words over the words of both, so that equal texts
  score 0.5. With a threshold of 0 (SWE pivot) any such text matches any other: only the tool, the names and types of
  arguments, and texts of one word decide. Set `word_count_similarity_threshold` higher to compare them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.environments.contract.responses import function_calls, message_texts
from recipes.environments.contract.rows import one_of, wrong
from recipes.environments.contract.verdict import Response, Verdict
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.types import Row

STRICT, FRACTIONAL, F1 = "binary_strict", "fractional", "f1"
LARGEST = sys.float_info.max
CONFIG = "tool_call_comparator_config"
NAME = "single_step_tool_use_with_argument_comparison"
THRESHOLDS = {"": 0.1, "toolcall_schema_": 0.1, "search_pivot_": 0.3, "swe_pivot_": 0.0}  # of the published instances


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


def parse_task(row: Row, settings: Mapping[str, Any]) -> Task:
    """Read `expected_action`, and the comparison from the setting `tool_call_comparator_config`."""
    action = row.get("expected_action")
    kind = action.get("type") if isinstance(action, Mapping) else None
    if not isinstance(action, Mapping) or kind not in ("message", "function_call", "function_call_batch"):
        raise wrong("expected_action", action, "a message, a function_call or a function_call_batch")
    calls = action.get("calls") if kind == "function_call_batch" else [action] if kind == "function_call" else []
    if not isinstance(calls, list) or (kind == "function_call_batch" and not calls):
        raise wrong("expected_action.calls", calls, "a list of at least one call")
    config = settings.get(CONFIG) or {}
    return Task(
        calls=tuple(_expected(call) for call in calls),
        threshold=float(config.get("word_count_similarity_threshold", 0.1)),
        float_tolerance=float(config.get("floating_point_comparison_threshold", 1e-6)),
        counts_batches=bool(config.get("parallel_tool_call_rewarding", False)),
        allows_fewer=bool(config.get("allow_subset", False)),
        allows_more=bool(config.get("allow_superset", False)),
        mode=one_of("mode", config.get("parallel_tool_call_reward_mode", STRICT), (STRICT, FRACTIONAL, F1)),
        compares_by_value=bool(config.get("compare_numbers_by_value", False)),
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
        return Verdict(
            reward=float(not calls), reason="a call, expected a message" if calls else "a message, as expected"
        )
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

    def place(row: int, seen: set[int]) -> bool:
        for column, fits in enumerate(edges[row]):
            if fits and column not in seen:
                seen.add(column)
                if column not in owner or place(owner[column], seen):
                    owner[column] = row
                    return True
        return False

    return sum(place(row, set()) for row in range(len(edges)))


def _problem(wanted: tuple[str, Any], found: tuple[Any, Any], task: Task) -> str | None:
    """Return how an actual call differs from an expected one, None when it matches."""
    if found[0] != wanted[0]:
        return f"called {str(found[0])[:60]}, expected {wanted[0]}"
    if found[1] is UNREADABLE:
        return "the arguments are no JSON"
    return _difference(wanted[1], found[1], task)


def _difference(wanted: Any, found: Any, task: Task) -> str | None:
    if not _has_type_of(wanted, found, task):
        return f"a value of type {type(found).__name__}, expected {type(wanted).__name__}"
    if isinstance(wanted, dict):
        if wanted.keys() != found.keys():
            return f"the keys differ from {sorted(wanted)}"
        pairs = [(wanted[key], found[key]) for key in wanted]
    elif isinstance(wanted, list):
        if len(wanted) != len(found):
            return f"a list of {len(found)}, expected {len(wanted)}"
        pairs = list(zip(wanted, found, strict=True))
    else:
        return None if _same(wanted, found, task) else f"the value {str(found)[:60]!r}, expected {str(wanted)[:60]!r}"
    return next((problem for pair in pairs if (problem := _difference(*pair, task))), None)


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
    bags = Counter(wanted.lower().split()), Counter(found.lower().split())
    sizes = bags[0].total(), bags[1].total()
    if min(sizes) < 2:
        return bool(wanted == found)
    return bool((bags[0] & bags[1]).total() / sum(sizes) >= task.threshold)


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="SingleStepToolUseArgumentComparisonResourcesServer",
    rewards=(0.0, 1.0),
    agents={
        f"{stem}{NAME}_agent": Agent(kind="single_turn", server=f"{stem}{NAME}_resources_server") for stem in THRESHOLDS
    },
    servers={
        f"{stem}{NAME}_resources_server": {CONFIG: {"word_count_similarity_threshold": threshold}}
        for stem, threshold in THRESHOLDS.items()
    },
    settings=frozenset({CONFIG}),
    is_cheap=lambda _task: True,
)
