"""The agent of tools: model calls and tool calls in turn, until the model answers without a call; then the verdict.

A rollout ends when

    the model calls no tool                         completed, scored
    `max_steps` model calls were made               completed, scored; the last calls have been run
    a call is cut off, or the context is full       truncated, scored as it stands
    a prompt does not continue the ids seen so far  aborted, no reward; the reason shows both texts
    a tool, the session or the engine fails         no reward

The collector bounds the time of the whole rollout, the engine that of a model call, the session that of a tool call.
Token in, token out: what was sampled in earlier turns is never rendered again (`chat/codec.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import orjson

from recipes.environments.agents.episode import Episode, make_turn, scored, unscored, unusable
from recipes.environments.chat.codec import Decoded, PrefixError, callable_tools
from recipes.environments.contract.responses import Item, function_call_output_item, response_object
from recipes.environments.contract.tools import read_arguments
from recipes.environments.contract.verdict import NoVerdict
from recipes.environments.scoring.clients import Session, ToolFailedError
from recipes.types import PREFIX_BREAKS, Completion, Rollout, RolloutStatus, Turn

MAX_ANSWERED = 1_000_000  # characters of all answers of a rollout, more than any context holds; the rest is cut off


class _EndedError(Exception):
    """The rollout has no reward, for this reason."""

    def __init__(self, status: RolloutStatus, reason: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(reason)
        self.status, self.metrics = status, metrics or {}


@dataclass(slots=True)
class _Conversation:
    """What has been said so far: as items, and as the ids that were seen."""

    items: list[Item] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seen_ids: tuple[int, ...] = ()
    text: str = ""  # of the last turn
    num_calls: int = 0
    num_answered: int = 0  # characters that tools have answered

    def add(self, new_ids: tuple[int, ...], completion: Completion, decoded: Decoded, turn: Turn) -> list[Item]:
        """Add one turn; returns its function calls."""
        self.seen_ids += new_ids + completion.token_ids
        self.turns.append(turn)
        self.items.extend(decoded.items)
        self.text = decoded.text
        calls = [item for item in decoded.items if item["type"] == "function_call"]
        self.num_calls += len(calls)
        return calls

    def add_answer(self, text: str, *, call_id: str) -> None:
        """Add a tool's answer, or what MAX_ANSWERED leaves of it."""
        kept = text[: max(MAX_ANSWERED - self.num_answered, 0)]
        self.num_answered += len(kept)
        self.items.append(function_call_output_item(kept, call_id=call_id))


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
    conversation = _Conversation()
    waited = [time.monotonic() - start]  # seconds in the environment: the session, the tools, the verdict
    try:
        is_cut = await _converse(episode, session, conversation, waited)
    except _EndedError as end:
        rollout = unscored((), end.status, str(end), seconds=time.monotonic() - start)
        return replace(rollout, metrics=end.metrics, output_text=conversation.text, env_seconds=sum(waited))
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


async def _converse(episode: Episode, session: Session, said: _Conversation, waited: list[float]) -> bool:
    """Let the model and the tools take turns; returns whether the last turn was cut off."""
    tools = callable_tools(episode.params)
    names = {tool["name"] for tool in tools}
    new_ids = episode.codec.encode(episode.params)
    while True:
        completion = await episode.model.generate(said.seen_ids + new_ids, max_tokens=episode.max_tokens)
        if said.turns and completion.finish_reason == "length" and not completion.token_ids:
            return True  # the context is full; the turns so far count
        if problem := unusable(completion, num_prompt_tokens=len(said.seen_ids + new_ids)):
            raise _EndedError(RolloutStatus.ABORTED, problem)
        decoded = episode.codec.decode(completion.token_ids, prompt_ids=new_ids, tools=tools, num_calls=said.num_calls)
        calls = said.add(new_ids, completion, decoded, make_turn(new_ids, completion, decoded, episode.patterns))
        if completion.finish_reason == "length":
            return True
        began = time.monotonic()
        for call in calls:
            answer = await _answer(call, session, names)
            said.add_answer(answer, call_id=call["call_id"])
        waited.append(time.monotonic() - began)
        if not calls or len(said.turns) == episode.max_steps:
            return False
        try:
            new_ids = episode.codec.extend(said.seen_ids, episode.params, said.items)
        except PrefixError as error:
            reason = f"prefix break before turn {len(said.turns) + 1}: {error}"
            raise _EndedError(RolloutStatus.ABORTED, reason, {PREFIX_BREAKS: 1.0}) from error


async def _answer(call: Item, session: Session, names: set[str]) -> str:
    """Run one function call; what is wrong with a call is its answer, so that the model can correct itself."""
    try:
        if call["name"] not in names:  # a name that was not offered may be another address of the server
            raise ValueError(f"Unknown tool: {call['name']}")
        return await session.call(call["name"], _arguments(call))
    except ValueError as error:
        return orjson.dumps({"error": str(error)}).decode()
    except ToolFailedError as error:
        raise _EndedError(RolloutStatus.ENV_FAILED, str(error)) from error


def _arguments(call: Item) -> Mapping[str, object]:
    try:
        return read_arguments(call["arguments"])
    except ValueError as error:
        raise ValueError(f"Invalid tool call arguments: {error}") from error
