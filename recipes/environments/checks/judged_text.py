"""What verifiers with a judge read from rows and responses: the last user message, an answer without its thinking."""

from __future__ import annotations

import re

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
