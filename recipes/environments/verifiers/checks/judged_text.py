"""What verifiers with a judge read from rows and responses: the last user message, an answer without its thinking.

From the scores of a rubric's items to one reward.
"""

from __future__ import annotations

import re
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


_OPENING = re.compile(r"<(think|thinking)>")
_CLOSING = re.compile(r"</think(?:ing)?>")


def without_thinking(text: str) -> str:
    """Return a text without `<think>` and `<thinking>` blocks, and without what stands before a lone closing tag.

    Takes time linear in the text, whatever tags a model writes.
    """
    kept, at = [], 0
    for opening in _OPENING.finditer(text):
        if opening.start() < at:
            continue
        closing = text.find(f"</{opening[1]}>", opening.end())
        if closing < 0:
            break
        kept.append(text[at : opening.start()])
        at = closing + len(opening[1]) + 3
    rest = "".join([*kept, text[at:]])
    closings = list(_CLOSING.finditer(rest))
    return rest[closings[-1].end() :].strip() if closings else rest.strip()
