"""The agent of tools: model calls and tool calls in turn, until the model answers without a call; then the verdict.

A rollout ends when

    the model calls no tool                         completed, scored
    `max_steps` model calls were made               completed, scored; the last calls have been run
    a call is cut off, or the context is full       truncated, scored as it stands
    a prompt does not continue the ids seen so far  aborted, no reward; the reason shows both texts
    a tool, the session or the engine fails         no reward

The collector bounds the time of the whole rollout, the engine that of a model call, the session that of a tool call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import orjson

from recipes.environments.agents.conversation import Conversation, EndedError
from recipes.environments.agents.episode import Episode, scored, unscored
from recipes.environments.chat.codec import callable_tools
from recipes.environments.contract.responses import Item, response_object
from recipes.environments.contract.tools import read_arguments
from recipes.environments.contract.verdict import NoVerdict
from recipes.environments.scoring.clients import Session, ToolFailedError
from recipes.types import Rollout, RolloutStatus


async def tool_loop(episode: Episode) -> Rollout:
    """Run one rollout: open a session, let the model and the tools take turns, ask for the verdict."""
    start = time.monotonic()
    session = await episode.verifier.open(episode.row)
    if isinstance(session, NoVerdict):
        return unscored((), session.status, session.reason, seconds=time.monotonic() - start)
    try:
        return await _in_session(episode, session, start)
    finally:
        await session.close()


async def _in_session(episode: Episode, session: Session, start: float) -> Rollout:
    """Run the rollout that began at `start`, in seconds of the monotonic clock."""
    conversation = Conversation(episode, episode.params)
    waited = [time.monotonic() - start]  # seconds in the environment: the session, the tools, the verdict
    try:
        await _converse(conversation, session, waited)
    except EndedError as end:
        rollout = unscored((), end.status, str(end), seconds=time.monotonic() - start)
        return replace(rollout, metrics=end.metrics, output_text=conversation.text, env_seconds=sum(waited))
    is_cut = conversation.is_cut
    response = response_object(conversation.items, incomplete_reason="max_output_tokens" if is_cut else None)
    asked = time.monotonic()
    verdict = await session.verify(response)
    end_time = time.monotonic()
    waited.append(end_time - asked)
    if isinstance(verdict, NoVerdict):
        rollout = unscored(conversation.turns, verdict.status, verdict.reason, seconds=end_time - start)
    else:
        rollout = scored(conversation.turns, verdict, is_cut=is_cut, seconds=end_time - start)
    return replace(rollout, output_text=conversation.text, env_seconds=sum(waited))


async def _converse(said: Conversation, session: Session, waited: list[float]) -> None:
    """Let the model and the tools take turns; adds the seconds of the tools to `waited`."""
    names = {tool["name"] for tool in callable_tools(said.params)}
    while calls := await said.next_turn():
        began = time.monotonic()
        for call in calls:
            said.add_answer(await _answer(call, session, names), call_id=call["call_id"])
        waited.append(time.monotonic() - began)
        if len(said.turns) == said.episode.max_steps:
            return


async def _answer(call: Item, session: Session, names: set[str]) -> str:
    """Run one function call; what is wrong with a call is its answer, so that the model can correct itself."""
    try:
        if call["name"] not in names:  # a name that was not offered may be another address of the server
            raise ValueError(f"Unknown tool: {call['name']}")
        return await session.call(call["name"], _arguments(call))
    except ValueError as error:
        return orjson.dumps({"error": str(error)}).decode()
    except ToolFailedError as error:
        raise EndedError(RolloutStatus.ENV_FAILED, str(error)) from error


def _arguments(call: Item) -> Mapping[str, object]:
    try:
        return read_arguments(call["arguments"])
    except ValueError as error:
        raise ValueError(f"Invalid tool call arguments: {error}") from error
