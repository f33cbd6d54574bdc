"""What verifiers with a judge read from rows and responses: the last user message, an answer without its thinking."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OPENING = re.compile(r"<(think|thinking)>")
_CLOSING = re.compile(r"</think(?:ing)?>")


def last_user_text(row: Mapping[str, Any]) -> str:
    """Return the text of the row's last user message, its parts joined by newlines; "" without one."""
    given = (row.get("responses_create_params") or {}).get("input", ())
    if isinstance(given, str):
        return given
    for item in reversed(given):
        if item.get("role") == "user":
            content = item.get("content")
            parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
            return "\n".join(parts)
    return ""


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
