"""The agent of refinement: an answer that its verifier finds wanting is corrected, in a new conversation each time.

The verifier says what a correction must be asked with, as `correction_prompt` among its details. A correction sees that
prompt and nothing of what was said before, so only the last attempt is trained: its turn and its reward are the
rollout's. After `max_steps` attempts the last one stands. So does an attempt whose correction would have no room for an
answer: it showed a long attempt, and errors with long lines of it, and what is so long must not be spared its reward.

A correction keeps the row's limit of output tokens and its `metadata`, where arguments of the chat template stand. The
reference drops both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipes.environments.agents.episode import Episode
from recipes.environments.agents.single_turn import attempt
from recipes.types import Rollout

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
