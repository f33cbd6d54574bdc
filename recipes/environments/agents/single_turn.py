"""Agents: who talks to the policy during one rollout, and when the verifier is asked.

An agent samples, builds the Responses object of its episode and asks for the verdict. `single_turn` is one model
call without tool execution; further kinds are further functions of the same shape in AGENT_KINDS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.environments.codec import ChatCodec, Decoded
from recipes.environments.responses import response_object
from recipes.environments.scoring.clients import VerifierClient
from recipes.environments.tool_calls import FlagPatterns, turn_flags
from recipes.environments.verdict import NoVerdict, Verdict
from recipes.types import Completion, ModelClient, Rollout, RolloutStatus, Row, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an agent works with during one rollout."""

    row: Row
    codec: ChatCodec
    model: ModelClient
    verifier: VerifierClient
    patterns: FlagPatterns
    max_tokens: int  # of one model call

    @property
    def params(self) -> Mapping[str, Any]:
        """The row's Responses request."""
        params: Mapping[str, Any] = self.row["responses_create_params"]
        return params


async def single_turn(episode: Episode) -> Rollout:
    """Call the model once and score its answer. A call cut off by its length is scored as it stands."""
    start = time.monotonic()
    prompt_ids = episode.codec.encode(episode.params)
    completion = await episode.model.generate(prompt_ids, max_tokens=episode.max_tokens)
    if problem := unusable(completion, num_prompt_tokens=len(prompt_ids)):
        return unscored((), RolloutStatus.ABORTED, problem, seconds=time.monotonic() - start)

    decoded = episode.codec.decode(completion.token_ids, prompt_ids=prompt_ids, tools=episode.params.get("tools") or ())
    turns = (make_turn(prompt_ids, completion, decoded, episode.patterns),)
    is_cut = completion.finish_reason == "length"
    response = response_object(decoded.items, incomplete_reason="max_output_tokens" if is_cut else None)
    asked = time.monotonic()
    verdict = await episode.verifier.verify(episode.row, response)
    end = time.monotonic()
    if isinstance(verdict, NoVerdict):
        rollout = unscored(turns, verdict.status, verdict.reason, seconds=end - start)
    else:
        rollout = scored(turns, verdict, is_cut=is_cut, seconds=end - start)
    return replace(rollout, output_text=decoded.text, env_seconds=end - asked)


AGENT_KINDS: Mapping[str, Callable[[Episode], Awaitable[Rollout]]] = {"single_turn": single_turn}


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


def make_turn(prompt_ids: tuple[int, ...], completion: Completion, decoded: Decoded, patterns: FlagPatterns) -> Turn:
    """Return one model call as a turn; `prompt_ids` are those that were new in its prompt."""
    is_invalid_tool_call, has_malformed_thinking = turn_flags(decoded.items[-1], patterns)
    return Turn(
        prompt_token_ids=prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        is_invalid_tool_call=is_invalid_tool_call,
        has_malformed_thinking=has_malformed_thinking,
    )


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
