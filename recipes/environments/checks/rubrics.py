"""From the scores of a rubric's items to one reward."""

from __future__ import annotations

from collections.abc import Sequence

AGGREGATIONS = ("mean", "min", "max", "all", "any", "weighted")


def aggregate(scores: Sequence[float], weights: Sequence[float], mode: str) -> float:
    """Combine item scores in [0, 1]; with `weighted` by their weights, 0.0 when these add up to 0."""
    if mode == "weighted":
        total = sum(weights)
        return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / total if total else 0.0
    combine = {"mean": lambda: sum(scores) / len(scores), "min": lambda: min(scores), "max": lambda: max(scores)}
    combine |= {"all": combine["min"], "any": combine["max"]}
    return float(combine[mode]())
