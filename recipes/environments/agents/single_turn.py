"""The single-turn agent: one model call whose answer is scored. It executes no tools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipes.environments.agents.episode import Episode, awaiting_group, make_turn, scored, unscored, unusable
from recipes.environments.chat.codec import callable_tools
from recipes.environments.contract.responses import response_object
from recipes.environments.contract.verdict import NoVerdict, Pending, Verdict
from recipes.types import Rollout, RolloutStatus


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

    decoded = episode.codec.decode(completion.token_ids, prompt_ids=prompt_ids, tools=callable_tools(params))
    turns = (make_turn(prompt_ids, completion, decoded, episode.patterns),)
    is_cut = completion.finish_reason == "length"
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
