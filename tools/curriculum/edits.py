"""Edits of one row: mark it as low-effort, remove its reasoning, or cut its reasoning to a budget.

Each edit returns a changed copy and leaves the row as it was.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from recipes.types import Row

THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)

Cut = Callable[[str, int], str]
"""(text, budget) -> the first `budget` tokens of the text."""


def has_reasoning(row: Row) -> bool:
    """Return whether an earlier turn in the conversation of a row holds reasoning."""
    in_texts = any(THINK.search(holder[key]) for holder, key in _assistant_texts(row))
    return in_texts or bool(_summaries(row))


def with_marker(row: Row, marker: str) -> dict[str, Any]:
    """Return the row with `marker` at the end of its last user turn, added only when it is not there."""
    changed = copy.deepcopy(dict(row))
    params = changed["responses_create_params"]
    if isinstance(params["input"], str):
        params["input"] = _marked(params["input"], marker)
        return changed
    for item in reversed(params["input"]):
        if item.get("role") != "user":
            continue
        if isinstance(item["content"], str):
            item["content"] = _marked(item["content"], marker)
        else:
            item["content"][-1]["text"] = _marked(item["content"][-1]["text"], marker)
        break
    return changed


def is_marked(row: Row, marker: str) -> bool | None:
    """Return whether the last user turn of a row ends with `marker`; None when the row has no user turn."""
    items = row["responses_create_params"]["input"]
    if not isinstance(items, str) and all(item.get("role") != "user" for item in items):
        return None
    return with_marker(row, marker) == row


def without_reasoning(row: Row) -> dict[str, Any]:
    """Return the row without reasoning, and with thinking switched off in the chat template."""
    changed = copy.deepcopy(dict(row))
    params = changed["responses_create_params"]
    if not isinstance(params["input"], str):
        params["input"] = [item for item in _items(changed) if item.get("type") != "reasoning"]
        for holder, key in _assistant_texts(changed):
            holder[key] = THINK.sub("", holder[key]).lstrip()
    metadata = dict(params.get("metadata") or {})
    kwargs = json.loads(metadata.get("chat_template_kwargs") or "{}")
    params["metadata"] = metadata | {"chat_template_kwargs": json.dumps(kwargs | {"enable_thinking": False})}
    return changed


def with_budget(row: Row, budget: int, cut: Cut) -> dict[str, Any]:
    """Return the row with the reasoning of each turn cut to `budget` tokens; the answers stay whole."""
    changed = copy.deepcopy(dict(row))
    for part in _summaries(changed):
        part["text"] = cut(part["text"], budget)
    for holder, key in _assistant_texts(changed):
        holder[key] = THINK.sub(lambda found: f"<think>{cut(found[1], budget)}</think>", holder[key])
    return changed


@lru_cache(maxsize=1)
def cut_by(tokenizer_dir: Path) -> Cut:
    """Return a `Cut` that counts tokens with the tokenizer in a Hugging Face directory."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))

    def cut(text: str, budget: int) -> str:
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= budget else text[: offsets[budget][0]]

    return cut


def _marked(text: str, marker: str) -> str:
    return text if text.endswith(marker) else text + marker


def _summaries(row: Row) -> list[dict[str, Any]]:
    """Return the parts of reasoning items that hold text."""
    items = [item for item in _items(row) if item.get("type") == "reasoning"]
    return [part for item in items for part in item.get("summary") or () if isinstance(part.get("text"), str)]


def _assistant_texts(row: Row) -> list[tuple[dict[str, Any], str]]:
    """Return (object, key) of every text that the assistant wrote."""
    found: list[tuple[dict[str, Any], str]] = []
    for item in _items(row):
        if item.get("role") != "assistant":
            continue
        if isinstance(item.get("content"), str):
            found.append((item, "content"))
        elif isinstance(item.get("content"), list):
            found += [(part, "text") for part in item["content"] if isinstance(part.get("text"), str)]
    return found


def _items(row: Row) -> list[dict[str, Any]]:
    items = row["responses_create_params"]["input"]
    return [] if isinstance(items, str) else items
