"""What `POST /aggregate_metrics` answers: statistics of verdicts, over all of them and per prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from recipes.environments.contract.rows import wrong

TASK = "_ng_task_index"  # one number per prompt, shared by all its rollouts
STATISTICS: Mapping[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
}


def aggregated(body: object) -> dict[str, Any]:
    """Return the answer to a list of verdicts, alone or as `verify_responses`; raises `ValueError` for another body.

    Verdicts that failed do not count. Those without the number of their prompt are in no group.
    """
    replies = body.get("verify_responses") if isinstance(body, Mapping) else body
    if not isinstance(replies, list) or not all(isinstance(reply, Mapping) for reply in replies):
        raise wrong("verify_responses", replies, "a list of objects")
    scored = [reply for reply in replies if "_ng_failure_class" not in reply]
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for reply in scored:
        if isinstance(reply.get(TASK), int):
            groups.setdefault(reply[TASK], []).append(reply)
    metrics = described(scored)
    return {
        "agent_metrics": metrics,
        "key_metrics": {"mean/reward": metrics.get("mean/reward")},
        "group_level_metrics": [{TASK: task, **described(groups[task])} for task in sorted(groups)],
    }


def described(replies: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return `<statistic>/<key>` of every numeric key, over the replies that have it; the deviation is the sample's."""
    values: dict[str, list[float]] = {}
    for reply in replies:
        for key, value in reply.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not key.startswith("_ng_"):
                values.setdefault(key, []).append(float(value))
    found: dict[str, float] = {}
    for key, numbers in values.items():
        mean = math.fsum(numbers) / len(numbers)
        found |= {f"{name}/{key}": of(numbers) for name, of in STATISTICS.items()}
        spread = math.fsum((number - mean) ** 2 for number in numbers)
        found[f"std/{key}"] = math.sqrt(spread / (len(numbers) - 1)) if len(numbers) > 1 else 0.0
    return found
