"""The Responses object: building its items, and the ways verifiers read text from it.

The ways differ on purpose: each verifier names the one that its reward was defined with. Reasoning items are
never part of the graded text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Item = dict[str, Any]


def message_item(text: str, *, index: int = 0) -> Item:
    """Return an assistant message with one text part."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": f"msg_{index}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def reasoning_item(summaries: Sequence[str], *, index: int = 0) -> Item:
    """Return a reasoning item with one summary part per text."""
    parts = [{"type": "summary_text", "text": text} for text in summaries]
    return {"id": f"rs_{index}", "type": "reasoning", "summary": parts}


def function_call_item(name: str, arguments: str, *, call_id: str) -> Item:
    """Return a function call; `arguments` is JSON text as the model wrote it."""
    return {
        "id": call_id,
        "call_id": call_id,
        "type": "function_call",
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


def function_call_output_item(output: str, *, call_id: str) -> Item:
    """Return what a tool answered to a call, as text."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def response_object(output: Sequence[Item], *, incomplete_reason: str | None = None) -> dict[str, Any]:
    """Return a Responses object around output items; a reason marks it incomplete."""
    return {
        "id": "resp_0",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "incomplete" if incomplete_reason else "completed",
        "incomplete_details": {"reason": incomplete_reason} if incomplete_reason else None,
    }


def output_items(response: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the output items that are objects."""
    output = response.get("output")
    if not isinstance(output, list):
        return []
    return [item for item in output if isinstance(item, Mapping)]


def _parts(item: Mapping[str, Any]) -> Iterator[str]:
    content = item.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield part["text"]


def all_text(response: Mapping[str, Any]) -> str:
    """Return every text part of every message, concatenated."""
    return "".join(message_texts(response))


def last_item_text(response: Mapping[str, Any]) -> str:
    """Return the first text part of the last output item; "" when that is no message."""
    items = output_items(response)
    return next(_parts(items[-1]), "") if items else ""


def last_message_text(response: Mapping[str, Any]) -> str:
    """Return the text parts of the last assistant message, joined by newlines, stripped."""
    messages = [item for item in output_items(response) if item.get("type") == "message"]
    return "\n".join(_parts(messages[-1])).strip() if messages else ""


def message_texts(response: Mapping[str, Any]) -> list[str]:
    """Return every text part of every message, in order."""
    return [text for item in output_items(response) if item.get("type") == "message" for text in _parts(item)]


def function_calls(response: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the function calls in order."""
    return [item for item in output_items(response) if item.get("type") == "function_call"]
