"""What all agents share: the episode they are given, the turns they record, and the rollout they end in.

An agent is a function from an `Episode` to a `Rollout`: it samples from the policy, builds the Responses object of
the episode and asks the verifier. Each kind of agent is one module here, named in `environments.AGENT_KINDS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.chat.codec import ChatCodec, Decoded, row_template_kwargs
from recipes.environments.chat.tool_calls import FlagPatterns, turn_flags
from recipes.environments.contract.verdict import Pending, Verdict
from recipes.environments.scoring.clients import VerifierClient
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
