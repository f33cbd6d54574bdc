"""Requests of real agent clients as they were recorded, and the answers that they were given."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from recipes.environments.agents.by_url.forest import CallNode, Forest
from recipes.environments.agents.by_url.messages import (
    CHAT,
    RESPONSES,
    CalledFunction,
    ChatMessage,
    ModelRequest,
    read_request,
    tools_digest,
)
from recipes.types import Turn, VersionSpan
from tests.recorded import recorded

VARIABLE = "AGENT_REQUESTS_DIR"  # names another directory of recordings of the same form


@dataclass(frozen=True)
class Recording:
    requests: list[dict[str, Any]]
    served: list[ChatMessage]
    expected: list[dict[str, Any]]  # of each call: `result` (root, extend or fork), and `parent`, a call's number


def recordings() -> list[str]:
    """Return the names of all recordings."""
    return sorted(path.stem for path in recorded(VARIABLE, "agent_requests").glob("*.json"))


def recording(name: str) -> Recording:
    """Return the bodies that a client sent, with path and headers, and the answers that it got.

    Skips where another directory does not have it.
    """
    path = recorded(VARIABLE, "agent_requests") / f"{name}.json"
    if VARIABLE in os.environ and not path.is_file():
        pytest.skip(f"{VARIABLE} has no {path.name}")
    parsed = json.loads(path.read_text(encoding="utf-8"))
    requests = parsed["requests"]
    for request in requests:
        if "same_as" in request["body"]:
            request["body"] = requests[request["body"]["same_as"]]["body"]
    served = [said(answer) for answer in parsed["served"] if "status" not in answer]
    return Recording(requests, served, parsed.get("expected") or [])


def said(answer: dict[str, Any]) -> ChatMessage:
    calls = tuple(CalledFunction(name=name, arguments=arguments) for name, arguments in answer.get("calls", ()))
    text, reasoning = answer.get("content") or "", answer.get("reasoning") or ""
    return ChatMessage(role="assistant", text=text, reasoning=reasoning, calls=calls)


def read(request: dict[str, Any]) -> ModelRequest:
    api = RESPONSES if request["path"].endswith("responses") else CHAT
    return read_request(api, orjson.dumps(request["body"]))


def turn(number: int, *, sampled: int = 2) -> Turn:
    """Return a turn whose ids say of which call they are."""
    ids = tuple(100 * number + n for n in range(sampled))
    spans = (VersionSpan(version=number, start=0, end=sampled),)
    logprobs = (-0.5,) * sampled
    return Turn(
        prompt_token_ids=(9000 + number,), token_ids=ids, logprobs=logprobs, versions=spans, finish_reason="stop"
    )


def add(forest: Forest, request: ModelRequest, served: ChatMessage, *, sampled: int = 2) -> CallNode:
    """Attach a request and store its answer, delivered."""
    digest = tools_digest(request.tools)
    keeps_tools = not request.tools and not request.reads_calls
    attachment = forest.attach(request.messages, digest, keeps_tools=keeps_tools)
    made = turn(len(forest.nodes), sampled=sampled)
    node = forest.add(attachment, served=served, turn=made, tools=digest, is_thinking_open=False)
    node.is_delivered = True
    return node


def kinds(nodes: list[CallNode]) -> str:
    """Return how calls were attached, as letters: R, E, F."""
    return " ".join(node.kind[0].upper() for node in nodes)
