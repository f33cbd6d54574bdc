"""Conversion between Responses items and chat messages, both ways.

Consecutive reasoning, message and function-call items of the assistant become one chat message, with the reasoning
as `<think>` blocks in front of its content; a sampled chat message becomes such items again. Token ids ride on the
last item of a model call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.environments.contract import (
    Item,
    function_call_item,
    message_item,
    reasoning_item,
    require_str,
    schema_without_padding,
    without_nulls,
    wrong,
)

Message = dict[str, Any]

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
PASSED_ON = ("metadata", "parallel_tool_calls", "store", "stream", "temperature", "tool_choice", "top_p", "user")
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ROLES = ("system", "developer", "user", "assistant")


def chat_request(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat-completions request for `responses_create_params`; raises `ValueError` naming the field."""
    request: dict[str, Any] = {key: params[key] for key in PASSED_ON if params.get(key) is not None}
    request["messages"] = chat_messages(params)
    if params.get("max_output_tokens") is not None:
        request["max_tokens"] = params["max_output_tokens"]
    if (params.get("reasoning") or {}).get("effort"):
        request["reasoning_effort"] = params["reasoning"]["effort"]
    if tools := chat_tools(params):
        request["tools"] = tools
    elif request.get("tool_choice") == "required":
        raise ValueError("tool_choice='required' requires at least one tool")
    else:
        request.pop("tool_choice", None)
        request.pop("parallel_tool_calls", None)
    return request


def chat_tools(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools in the nested form of the chat API, without `strict`."""
    tools = params.get("tools") or []
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of function tools")
    for tool in tools:
        if not isinstance(tool, Mapping) or (tool.get("type") or "function") != "function" or not tool.get("name"):
            raise wrong("tools", tool, "a function tool with a name")
    return [{"type": "function", "function": function_of(tool)} for tool in tools]


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a function the model is shown: all but its type, `strict` and null padding."""
    shown = {key: value for key, value in without_nulls(tool).items() if key not in ("type", "strict")}
    return shown | {"parameters": schema_without_padding(shown["parameters"])} if "parameters" in shown else shown


def chat_messages(params: Mapping[str, Any]) -> list[Message]:
    """Return the conversation as chat messages; `instructions` join the leading system messages."""
    items = params.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": [{"type": "input_text", "text": items}]}]
    if not isinstance(items, list):
        raise wrong("input", items, "a string or a list of items")
    messages: list[Message] = []
    is_open = False  # whether the last message is an assistant's, to be continued by the next item
    texts: list[str] = []  # of the last assistant's message
    for item in items:
        if not isinstance(item, Mapping):
            raise wrong("input", item, "items that are objects")
        if is_assistants(item):
            if not is_open:
                messages.append({"role": "assistant", "content": None})
            _continue_assistant(messages[-1], item, texts)
        else:
            _close_assistant(messages, texts)
            messages.append(_other_message(item))
        is_open = is_assistants(item)
    _close_assistant(messages, texts)
    return _with_instructions(messages, params.get("instructions"))


def is_assistants(item: Mapping[str, Any]) -> bool:
    """Return whether the assistant wrote an item."""
    return item.get("type") in ("reasoning", "function_call") or item.get("role") == "assistant"


def _with_instructions(messages: list[Message], instructions: str | None) -> list[Message]:
    if not instructions:
        return messages
    parts, rest = [instructions], list(messages)
    while rest and rest[0]["role"] in ("system", "developer"):
        parts.append(flat_text(rest.pop(0)["content"]))
    return [{"role": "system", "content": "\n\n".join(parts)}, *rest]


def _other_message(item: Mapping[str, Any]) -> Message:
    if item.get("type") == "function_call_output":
        call_id = require_str(item, "call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"), "output")}
    if (item.get("type") or "message") != "message" or item.get("role") not in _ROLES:
        raise wrong("input", item.get("type") or item.get("role"), "a message, reasoning, function call or its output")
    return {"role": item["role"], "content": _content(item.get("content"), "content")}


def _content(content: object, field: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(field, content, "a string or a list of text parts")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise wrong(field, kind, "text parts only")
    return [{"type": "text", "text": part["text"]} for part in content]


def flat_text(content: object) -> str:
    """Return a message's content as one string: parts joined by newlines."""
    if isinstance(content, str) or content is None:
        return content or ""
    assert isinstance(content, list)
    return "\n".join(part["text"] for part in content)


def _close_assistant(messages: list[Message], texts: list[str]) -> None:
    """Give the last message its text; joined once, so that many items take linear time."""
    if texts:
        messages[-1]["content"] = "".join(texts)
        texts.clear()


def _continue_assistant(message: Message, item: Mapping[str, Any], texts: list[str]) -> None:
    """Add one assistant-side item to the message it belongs to, its text to `texts`."""
    if item.get("type") == "reasoning":
        parts = [part.get("text") for part in item.get("summary") or [] if isinstance(part, Mapping)]
        texts.append("".join(f"<think>{text}</think>" for text in parts if text))
    elif item.get("type") == "function_call":
        function = {"name": require_str(item, "name"), "arguments": require_str(item, "arguments")}
        call = {"id": require_str(item, "call_id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        content = _content(item.get("content"), "content")
        texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
    message.update({field: item[field] for field in TOKEN_FIELDS if item.get(field) is not None})


def assistant_items(message: Mapping[str, Any]) -> list[Item]:
    """Return the output items of one sampled chat message: reasoning, then text, then function calls."""
    content = message.get("content") or ""
    # Blocks end before `rest`: without it, each `<think>` that never closes would be searched to the end of the text.
    blocks, end, rest = content.rpartition("</think>")
    blocks += end
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    summaries = _THINK.findall(blocks)
    text = _THINK.sub("", blocks) + rest
    items = [reasoning_item(summaries)] if summaries else []
    if text or not (summaries or calls):
        items.append(message_item(text))
    for call in calls:
        function = call["function"]
        items.append(function_call_item(function["name"], function["arguments"], call_id=call["id"]))
    items[-1].update({field: message[field] for field in TOKEN_FIELDS if message.get(field) is not None})
    return items
