"""A conversation of several model calls, as agents with tools have it: what was said, as items and as ids.

Token in, token out: what was sampled in earlier turns is never rendered again (`chat/codec.py`). A prompt that does not
continue the ids seen so far ends the rollout without a reward, and so does an answer that cannot be trained on.

What all agents share: the episode they are given, the turns they record, and the rollout they end in.

An agent is a function from an `Episode` to a `Rollout`: it samples from the policy, builds the Responses object of
the episode and asks the verifier. `environments.AGENT_KINDS` names the kinds.

The agent of tools: model calls and tool calls in turn, until the model answers without a call; then the verdict.

A rollout ends when

    the model calls no tool                         completed, scored
    `max_steps` model calls were made               completed, scored; the last calls have been run
    a call is cut off, or the context is full       truncated, scored as it stands
    a prompt does not continue the ids seen so far  aborted, no reward; the reason shows both texts
    a tool, the session or the engine fails         no reward

The collector bounds the time of the whole rollout, the engine that of a model call, the session that of a tool call.

The single-turn agent: one model call whose answer is scored. It executes no tools.

The agent of refinement: an answer that its verifier finds wanting is corrected, in a new conversation each time.

The verifier says what a correction must be asked with, as `correction_prompt` among its details. A correction sees that
prompt and nothing of what was said before, so only the last attempt is trained: its turn and its reward are the
rollout's. After `max_steps` attempts the last one stands. So does an attempt whose correction would have no room for an
answer: it showed a long attempt, and errors with long lines of it, and what is so long must not be spared its reward.

A correction keeps the row's limit of output tokens and its `metadata`, where arguments of the chat template stand. The
reference drops both.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from jinja2 import TemplateError

from recipes.environments.chat.codec import ChatCodec, Decoded, PrefixError, callable_tools, row_template_kwargs
from recipes.environments.chat.messages import chat_messages
from recipes.environments.chat.tool_calls import FlagPatterns, turn_flags
from recipes.environments.contract.verifier import (
    Item,
    NoVerdict,
    Pending,
    Verdict,
    function_call_output_item,
    read_arguments,
    response_object,
)
from recipes.environments.scoring.clients import Session, ToolFailedError, VerifierClient
from recipes.token_ids import TokenIds
from recipes.types import PREFIX_BREAKS, Completion, ModelClient, Rollout, RolloutStatus, Row, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an agent works with during one rollout."""

    row: Row
    codec: ChatCodec
    model: ModelClient
    verifier: VerifierClient
    patterns: FlagPatterns
    max_tokens: int  # of one model call
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the agent; a row's own win
    max_steps: int | None = None  # model calls at most, for an agent that makes several; None = no limit

    @property
    def params(self) -> Mapping[str, Any]:
        """The row's Responses request, with the template arguments of its agent."""
        params: Mapping[str, Any] = self.row["responses_create_params"]
        if not self.template_kwargs:
            return params
        arguments = json.dumps({**self.template_kwargs, **row_template_kwargs(params)})
        return {**params, "metadata": {**(params.get("metadata") or {}), "chat_template_kwargs": arguments}}


def unusable(completion: Completion, *, num_prompt_tokens: int) -> str | None:
    """Return why a completion cannot be scored or trained on, None when it can."""
    if completion.finish_reason not in ("stop", "length"):
        return f"the engine ended the request: {completion.finish_reason}"
    if not completion.token_ids:
        return f"the prompt of {num_prompt_tokens} tokens leaves no room for an answer"
    bad = next((n for n, logprob in enumerate(completion.logprobs) if not math.isfinite(logprob)), None)
    if bad is not None:
        return f"the engine returned log-probability {completion.logprobs[bad]} for token {bad}"
    return None


def make_turn(
    prompt_ids: tuple[int, ...],
    completion: Completion,
    decoded: Decoded,
    patterns: FlagPatterns,
    tools: Sequence[Mapping[str, Any]],
) -> Turn:
    """Return one model call as a turn; `prompt_ids` are those that were new in its prompt, `tools` what it offers."""
    is_invalid_tool_call, has_malformed_thinking = turn_flags(decoded.items[-1], patterns)
    return Turn(
        prompt_token_ids=prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        is_invalid_tool_call=is_invalid_tool_call,
        has_malformed_thinking=has_malformed_thinking,
        routes=completion.routes,
        tool_calls=_tool_calls(decoded.items, tools, has_text_of_call=is_invalid_tool_call),
    )


def _tool_calls(
    items: Sequence[Item], tools: Sequence[Mapping[str, Any]], *, has_text_of_call: bool
) -> tuple[int, int]:
    """Count calls, and those of tools not offered; without tools none is read, and a text with marks of one counts."""
    if not tools:
        return int(has_text_of_call), int(has_text_of_call)
    offered = {tool.get("name") for tool in tools}
    called = [item["name"] for item in items if item["type"] == "function_call"]
    return len(called), sum(name not in offered for name in called)


def scored(turns: Sequence[Turn], verdict: Verdict, *, is_cut: bool, seconds: float) -> Rollout:
    """Return a rollout with its verdict."""
    return Rollout(
        turns=tuple(turns),
        status=RolloutStatus.TRUNCATED if is_cut else RolloutStatus.COMPLETED,
        reason=verdict.reason,
        reward=verdict.reward,
        is_flagged=verdict.is_flagged,
        metrics=verdict.metrics,
        seconds=seconds,
    )


def unscored(turns: Sequence[Turn], status: RolloutStatus, reason: str, *, seconds: float) -> Rollout:
    """Return a rollout without a verdict, which never becomes a number."""
    return Rollout(turns=tuple(turns), status=status, reason=reason, reward=None, seconds=seconds)


def awaiting_group(turns: Sequence[Turn], pending: Pending, *, is_cut: bool, seconds: float) -> Rollout:
    """Return a rollout whose verdict comes once the answers of its group are there."""
    return Rollout(
        turns=tuple(turns),
        status=RolloutStatus.TRUNCATED if is_cut else RolloutStatus.COMPLETED,
        reason="its group is not scored yet",
        reward=None,
        seconds=seconds,
        response=pending.response,
    )


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


async def _converse(conversation: Conversation, session: Session, waited: list[float]) -> None:
    """Let the model and the tools take turns; adds the seconds of the tools to `waited`."""
    names = {tool["name"] for tool in callable_tools(conversation.params)}
    while calls := await conversation.next_turn():
        began = time.monotonic()
        for call in calls:
            conversation.add_answer(await _answer(call, session, names), call_id=call["call_id"])
        waited.append(time.monotonic() - began)
        if len(conversation.turns) == conversation.episode.max_steps:
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


KEPT = ("max_output_tokens", "metadata", "temperature", "top_p")  # fields of the row's request


async def refinement(episode: Episode) -> Rollout:
    """Attempt, and correct while the verifier asks for it; returns the last attempt with the seconds of all."""
    params, seconds, env_seconds, num_attempts = episode.params, 0.0, 0.0, 0
    while True:
        rollout, verdict = await attempt(episode, params)
        num_attempts += 1
        seconds, env_seconds = seconds + rollout.seconds, env_seconds + rollout.env_seconds
        prompt = verdict.details.get("correction_prompt") if verdict is not None else None
        if not prompt or num_attempts >= (episode.max_steps or 1):
            break
        params = corrected(episode.params, prompt)
        if len(episode.codec.encode(params)) >= episode.model.max_model_len:
            break
    metrics = {**rollout.metrics, "num_attempts": float(num_attempts)} if verdict is not None else rollout.metrics
    return replace(rollout, seconds=seconds, env_seconds=env_seconds, metrics=metrics)


def corrected(params: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Return the request of a correction."""
    kept = {key: params[key] for key in KEPT if key in params}
    return {**kept, "input": [{"role": "user", "content": prompt}]}


async def single_turn(episode: Episode) -> Rollout:
    """Call the model once and score its answer."""
    rollout, _ = await attempt(episode, episode.params)
    return rollout


async def attempt(episode: Episode, params: Mapping[str, Any]) -> tuple[Rollout, Verdict | None]:
    """Call the model once with a request and score its answer; returns the rollout, and its verdict if there is one.

    A call cut off by its length is scored as it stands.
    """
    start = time.monotonic()
    prompt_ids = episode.codec.encode(params)
    completion = await episode.model.generate(prompt_ids, max_tokens=episode.max_tokens)
    if problem := unusable(completion, num_prompt_tokens=len(prompt_ids)):
        return unscored((), RolloutStatus.ABORTED, problem, seconds=time.monotonic() - start), None

    is_cut = completion.finish_reason == "length"
    tools = callable_tools(params)
    decoded = episode.codec.decode(completion.token_ids, prompt_ids=prompt_ids, tools=tools, is_cut=is_cut)
    turns = (make_turn(prompt_ids, completion, decoded, episode.patterns, tools),)
    response = response_object(decoded.items, incomplete_reason="max_output_tokens" if is_cut else None)
    asked = time.monotonic()
    verdict = await episode.verifier.verify(episode.row, response)
    end = time.monotonic()
    if isinstance(verdict, NoVerdict):
        rollout = unscored(turns, verdict.status, verdict.reason, seconds=end - start)
    elif isinstance(verdict, Pending):
        rollout = awaiting_group(turns, verdict, is_cut=is_cut, seconds=end - start)
    else:
        rollout = scored(turns, verdict, is_cut=is_cut, seconds=end - start)
    rollout = replace(rollout, output_text=decoded.text, env_seconds=end - asked)
    return rollout, verdict if isinstance(verdict, Verdict) else None


CHECKED_TURNS = 16
MAX_ANSWERED = 1_000_000  # characters of all answers of a rollout, more than any context holds; the rest is cut off


class EndedError(Exception):
    """The rollout has no reward, for this reason."""

    def __init__(self, status: RolloutStatus, reason: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(reason)
        self.status, self.metrics = status, metrics or {}


@dataclass(slots=True)
class Conversation:
    """What has been said so far, beginning with the request `params`."""

    episode: Episode
    params: Mapping[str, Any]
    items: list[Item] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seen_ids: TokenIds = field(default_factory=TokenIds)
    text: str = ""  # of the last turn
    is_cut: bool = False  # whether the last turn was cut off, or the context has no room for another
    num_calls: int = 0
    num_answered: int = 0  # characters that tools have answered
    _num_before: int = 0  # items before those of the last turn
    _is_short: bool = True  # whether the new messages alone gave the ids that the whole conversation did

    async def next_turn(self) -> list[Item]:
        """Call the model once and return its function calls: none after a turn that was cut off.

        Raises `EndedError`, and what the model client raises.
        """
        codec, tools = self.episode.codec, callable_tools(self.params)
        new_ids = self._new_ids()
        prompt_ids = self.seen_ids.plus(new_ids)
        completion = await self.episode.model.generate(prompt_ids, max_tokens=self.episode.max_tokens)
        if self.turns and completion.finish_reason == "length" and not completion.token_ids:
            self.is_cut = True  # the context is full; the turns so far count
            return []
        if problem := unusable(completion, num_prompt_tokens=len(prompt_ids)):
            raise EndedError(RolloutStatus.ABORTED, problem)
        self.is_cut = completion.finish_reason == "length"
        decoded = codec.decode(
            completion.token_ids, prompt_ids=new_ids, tools=tools, num_calls=self.num_calls, is_cut=self.is_cut
        )
        self.seen_ids = prompt_ids.plus(completion.token_ids)
        self.turns.append(make_turn(new_ids, completion, decoded, self.episode.patterns, tools))
        self._num_before = len(self.items)
        self.items.extend(decoded.items)
        self.text = decoded.text
        calls = [item for item in decoded.items if item["type"] == "function_call"]
        self.num_calls += len(calls)
        return [] if self.is_cut else calls

    def add_answer(self, text: str, *, call_id: str) -> None:
        """Add a tool's answer, or what MAX_ANSWERED leaves of it."""
        self.items.append(function_call_output_item(self._kept(text), call_id=call_id))

    def add_message(self, text: str) -> None:
        """Add a message of the user, or what MAX_ANSWERED leaves of it."""
        self.items.append({"role": "user", "content": self._kept(text)})

    def _short_ids(self) -> tuple[int, ...] | None:
        """Return the ids of what follows the last turn, rendered without what came before; None where that fails."""
        answer, *messages = chat_messages({"input": self.items[self._num_before :]})
        try:
            ids = self.episode.codec.suffix(answer, messages, row_template_kwargs(self.params))
        except (PrefixError, TemplateError):  # a template may refuse the short conversation, such as its system message
            return None
        has_ended = self.seen_ids[-1:] == (self.episode.codec.eos_token_id,)
        return ids[1:] if has_ended and ids[:1] == self.seen_ids[-1:] else ids

    def _kept(self, text: str) -> str:
        kept = text[: max(MAX_ANSWERED - self.num_answered, 0)]
        self.num_answered += len(kept)
        return kept

    def _new_ids(self) -> tuple[int, ...]:
        """Return the ids that are new in the prompt of the next turn.

        Rendering all turns each time would take seconds in a long rollout. So where the template gives the same ids for
        the new messages alone, only these are rendered. The whole is looked at again after the first turn,
        CHECKED_TURNS turns later, and whenever the rollout is twice as long as then.
        """
        codec = self.episode.codec
        if not self.turns:
            return codec.encode(self.params)
        short = self._short_ids() if self._is_short else None
        parts, rest = divmod(len(self.turns) - 1, CHECKED_TURNS)
        is_checked = rest == 0 and parts & (parts - 1) == 0  # after 0, 1, 2, 4, ... times as many turns
        if short is not None and not is_checked:
            return short
        try:
            whole = codec.extend(self.seen_ids[:], self.params, self.items)
            self._is_short = whole == short
            return whole
        except PrefixError as error:
            reason = f"prefix break before turn {len(self.turns) + 1}: {error}"
            raise EndedError(RolloutStatus.ABORTED, reason, {PREFIX_BREAKS: 1.0}) from error
