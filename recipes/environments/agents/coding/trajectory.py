"""What the log keeps of a coding agent's work: every turn in order, the patch, and what the hidden tests said.

A trajectory of 200 turns is longer than a log should be. So each text is cut in its middle, the more texts the shorter,
and of very many items only the first and the last are kept; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.environments.contract.responses import Item
from recipes.environments.swe.contract import AgentEnd, Evaluation

MAX_CHARACTERS = 60_000  # of the texts of all items together
MAX_TEXT = 4_000  # characters of one text
MAX_ITEMS = 600  # half of them from the beginning
MAX_PATCH = 20_000  # characters


def note_trajectory(
    instance: str, items: Sequence[Item], *, end: AgentEnd, patch: str, evaluation: Evaluation | None
) -> dict[str, Any]:
    """Return a trajectory as JSON: its instance, its items in order, and how it ended.

    An item has a `role` and a `text`; a call has its `name`, too, and its text is its arguments.
    """
    half = MAX_ITEMS // 2
    dropped = max(0, len(items) - MAX_ITEMS)
    kept = [*items[:half], *items[-half:]] if dropped else list(items)
    limit = min(MAX_TEXT, MAX_CHARACTERS // max(1, len(kept)))
    shown = [_entry(item, limit) for item in kept]
    if dropped:
        shown.insert(half, {"role": "left out", "text": f"{dropped} items"})
    tests = None
    if evaluation is not None:
        tests = {"resolved": evaluation.resolved, "reason": shortened(evaluation.failed or evaluation.reason, MAX_TEXT)}
    return {
        "instance": instance[:MAX_TEXT],
        "items": shown,
        "end": str(end),
        "patch": shortened(patch, MAX_PATCH),
        "tests": tests,
    }


def shortened(text: str, limit: int) -> str:
    """Return a text of about `limit` characters: a longer one without its middle, and how much that was."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[len(text) - limit // 2 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def _entry(item: Item, limit: int) -> dict[str, str]:
    kind = item.get("type")
    if kind == "function_call":
        text = shortened(str(item["arguments"]), limit)
        return {"role": "call", "name": str(item["name"])[:100], "text": text}
    if kind == "function_call_output":
        return {"role": "tool", "text": shortened(str(item["output"]), limit)}
    if kind == "reasoning":
        return {"role": "reasoning", "text": shortened(_joined(item.get("summary")), limit)}
    content = item.get("content")
    text = content if isinstance(content, str) else _joined(content)
    return {"role": str(item.get("role", "assistant")), "text": shortened(text, limit)}


def _joined(parts: Any) -> str:
    texts = [part.get("text") for part in parts or () if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))
