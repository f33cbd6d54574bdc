"""What the model server refuses, what ends a rollout, and what hostile requests cost."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from recipes.environments.agents.by_url.messages import read_request
from recipes.environments.agents.by_url.session import MAX_CONTEXTS
from recipes.environments.chat.codec import ChatCodec
from recipes.errors import EngineError
from tests.unit.environments.agents.by_url.calling import (
    END,
    Policy,
    serving,
    user,
)

DONE = f"fine</think>Done.{END}"
QUESTION = [{"role": "system", "content": "s"}, user("u")]


async def test_case_40_size_and_depth_of_a_body(codec: ChatCodec) -> None:
    policy = Policy(codec, [DONE], max_model_len=10**8)
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    async with serving(policy) as rollout:
        large = await rollout.post({"messages": QUESTION, "metadata": {"pad": "x" * 1_900_000}})
        too_deep = await rollout.post({"messages": QUESTION, "metadata": nested})
        refused = [await rollout.post(body) for body in (b"", b"[]", b"\xff", b"{", b"null")]
    assert (large.status, too_deep.status) == (200, 400)
    assert {reply.status for reply in refused} == {400}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [user("u") | {"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, "content"),
        ({"messages": [user("u"), {"role": "assistant", "content": "Sure,"}]}, "messages"),
        ({"messages": [user("u")], "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.role"),
        ({"messages": [user("u")], "tools": "x"}, "tools"),
        ({"messages": [user("u")], "logit_bias": {"1": 2}}, "logit_bias"),
        ({"messages": [user("u")], "max_tokens": True}, "max_tokens"),
        ({"messages": [user("u")], "stop": [""]}, "stop"),
    ],
)
async def test_case_42_what_cannot_be_honoured_is_400_and_named(
    codec: ChatCodec, fields: dict[str, Any], named: str
) -> None:
    async with serving(Policy(codec, [DONE])) as rollout:
        reply = await rollout.post(fields)
    assert reply.status == 400 and named in reply.json()["error"]["message"]


async def test_an_agent_that_rewrites_its_history_for_ever_is_ended(codec: ChatCodec) -> None:
    policy = Policy(codec, [DONE], max_model_len=1000)
    statuses = []
    async with serving(policy) as rollout:
        while len(statuses) < 400 and 404 not in statuses:
            rewritten = f"step {len(statuses)} " * 60
            statuses.append((await rollout.post({"messages": [user(rewritten), user("u")], "max_tokens": 1})).status)
        kept = sum(len(node.turn.prompt_token_ids) for node in rollout.session.forest.nodes)
    assert statuses[-1] == 404 and set(statuses[:-1]) == {200}
    assert MAX_CONTEXTS * 1000 <= kept < (MAX_CONTEXTS + 1) * 1000 and rollout.session.is_spent


async def test_budget_of_calls_ends_the_rollout(codec: ChatCodec) -> None:
    async with serving(Policy(codec, [DONE]), limits={"num_calls": 2}) as rollout:
        replies = [await rollout.post({"messages": [user(str(n))]}) for n in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 404, 404]


async def test_late_call_is_503_and_asks_for_a_pause(codec: ChatCodec) -> None:
    policy = Policy(codec, [DONE], hold=asyncio.Event())
    async with serving(policy, limits={"call_seconds": 0.01}) as rollout:
        reply = await rollout.post({"messages": QUESTION})
    assert reply.status == 503 and reply.headers[b"retry-after"] == b"5"


async def test_engine_that_is_lost_is_told_to_the_rollout(codec: ChatCodec) -> None:
    async with serving(Policy(codec, [EngineError("engine 0 died")])) as rollout:
        assert (await rollout.post({"messages": QUESTION})).status == 503
    assert rollout.session.engine_failed.is_set() and str(rollout.session.engine_failure) == "engine 0 died"


JUNK = [None, True, 0, 1.5, "", "x", [], [None], [[]], [{}], {}, {"a": 1}, [{"role": "user"}], [{"type": "reasoning"}]]
FIELDS = ["messages", "input", "instructions", "tools", "tool_choice", "stop", "n", "max_tokens", "stream_options"]
FIELDS += ["text", "response_format", "previous_response_id", "logprobs", "content", "tool_calls", "summary", "call_id"]


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
async def test_values_of_wrong_types_never_break_the_server(codec: ChatCodec, route: str) -> None:
    """Each is answered, or refused in the API's form; nothing is a 500."""
    kinds = ["message", "reasoning", "function_call", "function_call_output"]
    items = [{"type": kind, "role": role} for kind in kinds for role in ("user", "assistant", "tool")]
    bodies = [{"messages": QUESTION, "input": "u", field: junk} for field in FIELDS for junk in JUNK]
    bodies += [
        {"messages": [{**item, field: junk}, user("u")], "input": [{**item, field: junk}, user("u")]}
        for item in items
        for field in ("content", "tool_calls", "summary", "arguments", "output", "reasoning", "role", "type")
        for junk in JUNK
    ]
    for start in range(0, len(bodies), 500):
        async with serving(Policy(codec, [DONE])) as rollout:
            replies = [await rollout.post(body, route) for body in bodies[start : start + 500]]
            assert {reply.status for reply in replies} <= {200, 400}
            assert all(reply.json()["error"]["message"] for reply in replies if reply.status == 400)


async def test_long_hostile_histories_take_linear_time(codec: ChatCodec) -> None:
    thoughts = {"role": "assistant", "content": "<think></think>" * 200_000 + "<think>" * 200_000}
    items = [{"type": "message", "role": "assistant", "content": "x" * 500} for _ in range(15_000)]
    chat = read_request("chat", orjson.dumps({"messages": [thoughts, user("u")]}))
    responses = read_request("responses", orjson.dumps({"input": [*items, user("u")]}))
    assert chat.messages[0].text == "<think>" * 200_000
    assert len(responses.messages[0].text) == 7_500_000
