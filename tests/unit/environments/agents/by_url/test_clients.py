"""Histories as the recorded clients shape them, and many agents at once; numbers are those of the conformance cases."""

from __future__ import annotations

import asyncio
import gc
import re
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest

from recipes.environments.agents.by_url.agent import Sequences, sequences_of
from recipes.environments.agents.by_url.server import ModelServer
from recipes.environments.chat.codec import ChatCodec
from recipes.types import Completion, VersionSpan
from tests.unit.environments.agents.by_url.calling import (
    END,
    TOOL,
    Policy,
    Rollout,
    answered,
    calling,
    serving,
    user,
)

DONE = f"fine</think>Done.{END}"
QUESTION = [{"role": "system", "content": "s"}, user("u")]


def trained_once(rollout: Rollout) -> Sequences:
    """Check that every call of a rollout is trained in one of its sequences; return them."""
    nodes = rollout.session.forest.nodes
    assert all(node.is_delivered for node in nodes)
    kept = sequences_of(rollout.session.forest, max_tokens=10**6)
    assert sorted(number for path in kept.trained for number in path) == list(range(len(nodes)))
    turns = [turn for index in range(len(kept.paths)) for turn in kept.turns(index)]
    assert sum(len(turn.token_ids) for turn in turns) == sum(len(node.turn.token_ids) for node in nodes)
    return kept


@pytest.mark.parametrize("status", [pytest.param("completed", id="8"), pytest.param("in_progress", id="8-stream")])
async def test_items_that_langchain_echoes_continue_the_call(codec: ChatCodec, status: str) -> None:
    """Its stream returns the items with the status that they had when they began."""
    policy, flat = Policy(codec, [calling("ls"), DONE]), {"type": "function", **TOOL["function"]}
    async with serving(policy) as rollout:
        body = {"input": [{"type": "message", **message} for message in QUESTION], "tools": [flat], "stream": True}
        reply = await rollout.post(body, "responses")
        echoed = [{**item, "status": status} for item in reply.events()[-1]["response"]["output"]]
        result = {"type": "function_call_output", "call_id": echoed[-1]["call_id"], "output": "a.txt"}
        await rollout.post({**body, "input": [*body["input"], *echoed, result]}, "responses")
    assert [item["type"] for item in echoed] == ["reasoning", "function_call"]
    assert rollout.kinds == "R E"
    first, sampled = policy.prompts[0], codec._tokenize(calling("ls"))
    assert policy.prompts[1][: len(first) + len(sampled)] == first + sampled


async def test_case_10_reasoning_only_turn_that_the_agent_hides(codec: ChatCodec) -> None:
    policy = Policy(codec, [calling("a"), calling("b"), f"only thoughts</think>{END}", DONE])
    async with serving(policy) as rollout:
        history = list(QUESTION)
        for step in range(4):
            message = await rollout.chat(history, tools=[TOOL])
            if step == 2:
                assert message["content"] == "" and "tool_calls" not in message
                history.append(user("call the tool"))
                continue
            message.pop("content")  # a client that drops null
            history += [message, answered("ok")]
    # The hidden turn is a leaf; the call after it forks from the node before it.
    assert rollout.kinds == "R E E F"
    assert rollout.session.forest.counts == {"assistant_missing": 1}
    kept = trained_once(rollout)
    assert kept.trained == ({0, 1, 3}, {2})


class NodesAtEachPart(list[bytes]):
    """The parts of an answer, with how many calls the forest had when each was written."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__()
        self.rollout, self.numbers = rollout, list[int]()

    def append(self, part: bytes) -> None:
        super().append(part)
        self.numbers.append(len(self.rollout.session.forest.nodes))


async def test_case_13_stream_has_usage_and_ends_after_the_call_is_stored(codec: ChatCodec) -> None:
    policy = Policy(codec, [calling("ls"), calling("pwd"), DONE])
    options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
    async with serving(policy) as rollout:
        history = list(QUESTION)
        for step in range(3):
            connection = rollout.open({"messages": history, **options})
            stored = NodesAtEachPart(rollout)
            connection.reply.parts = stored
            reply = await connection.done()
            assert stored.numbers[-1] == step + 1, "the client may call again as soon as it has the last part"
            assert reply.body.endswith(b"data: [DONE]\n\n")
            events = reply.events()
            deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
            assert events[-1]["usage"]["prompt_tokens"] == len(policy.prompts[-1])
            assert len(rollout.session.forest.nodes) == step + 1
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            message = {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}
            history += [{**message, "tool_calls": calls}, {**answered("ok"), "name": "bash"}]
    assert rollout.kinds == "R E E"
    trained_once(rollout)


async def test_case_14_compaction_starts_roots(codec: ChatCodec) -> None:
    policy = Policy(codec, [calling("ls"), f"ok</think>summary{END}", calling("cat"), f"k</think>second{END}", DONE])
    system = {"role": "system", "content": "s"}
    async with serving(policy) as rollout:
        history = [system, user("task")]
        for summary in ("first", "second"):
            message = await rollout.chat(history, tools=[TOOL])
            history += [message, answered("long"), user("summarise")]
            await rollout.chat(history, tools=[TOOL], tool_choice="none")
            history = [system, user(f"summary {summary}")]
        await rollout.chat(history, tools=[TOOL])
    forest = rollout.session.forest
    assert rollout.kinds == "R E R E R"
    assert forest.counts == {"user_changed": 2}
    assert [len(path) for path in trained_once(rollout).paths] == [2, 2, 1]


async def test_case_30_full_context_is_said_in_the_words_that_agents_know(codec: ChatCodec) -> None:
    policy = Policy(codec, [DONE], max_model_len=10)
    async with serving(policy) as rollout:
        reply = await rollout.post({"messages": QUESTION})
        rollout.prefix = "/ng-rollout/"
        of_gym = await rollout.post({"messages": QUESTION})
    error = reply.json()["error"]
    assert reply.status == 400 and error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 10 tokens. However, you requested ")
    assert of_gym.json()["choices"][0]["finish_reason"] == "length"
    assert rollout.session.forest.nodes == [] and rollout.session.is_full


@dataclass
class Echo:
    """A policy that all rollouts share: it says again which agent asked it, and at which turn."""

    codec: ChatCodec
    max_model_len: int = 100_000

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        await asyncio.sleep(0)
        asked = re.findall(r"agent \w+ turn \d+", self.codec.text(prompt_token_ids))
        ids = self.codec._tokenize(f"so</think>{asked[-1]}{END}")
        span = VersionSpan(version=1, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), versions=(span,), finish_reason="stop")


async def test_case_41_many_agents_at_once_are_told_apart_and_leave_nothing(codec: ChatCodec) -> None:
    app, policy = ModelServer(), Echo(codec)
    forests: list[weakref.ref[Any]] = []

    async def agent(number: int) -> None:
        async with serving(policy, app=app) as rollout:  # type: ignore[arg-type]
            forests.append(weakref.ref(rollout.session.forest))
            history: list[dict[str, Any]] = []
            for turn in range(4):
                question = f"agent {rollout.secret[:8].replace('-', 'x')} turn {turn}"
                history.append(user(f"{number}: {question}"))
                history.append(await rollout.chat(history))
                assert history[-1]["content"] == question
            assert rollout.kinds == "R E E E"

    await asyncio.gather(*(agent(number) for number in range(24)))
    assert not app._sessions and len(forests) == 24
    deadline = time.monotonic() + 20.0
    while any(forest() for forest in forests):  # a thread that has answered may not have let go of its work yet
        assert time.monotonic() < deadline, "a rollout is kept after its end"
        gc.collect()
        await asyncio.sleep(0.01)
