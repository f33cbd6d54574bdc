"""One group: the rollouts of one prompt, side by side, each within its deadline. Imports no Ray."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from recipes.errors import RequestError
from recipes.generation.clients.router import EngineSession
from recipes.rollouts.teachers import Teachers
from recipes.types import Completion, ModelClient, Rollout, RolloutHeader, RolloutStatus, Row, Sampling

StoredGroup = tuple[tuple[RolloutHeader, ...], Any]
"""The headers of a group's rollouts, and the reference of its tokens in the `TokenStore`."""


class Sampler(Protocol):
    """What samples on the engines: `Generation` and `EngineClient`."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        affinity: int,
        sample: tuple[int, ...],
        session: EngineSession | None = None,
    ) -> Completion: ...

    def end(self, session: EngineSession) -> None: ...


class AgentRunner(Protocol):
    """The part of `Environments` that rollouts use."""

    def reserve(self, row: Row, *, seconds: float) -> AbstractAsyncContextManager[None]: ...

    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout: ...

    async def finish_group(self, row: Row, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One prompt to answer."""

    row: Row
    sampling: Sampling
    affinity: int  # number of the prompt
    num_rollouts: int
    is_trained: bool = True  # whether the rollouts are trained on: teachers are asked about no others


@dataclass(frozen=True, slots=True)
class PolicyClient:
    """Samples for one rollout: the given profile, clamped to the room that is left in the context.

    Its calls are a session: each sends only the tokens that are new. Whoever makes it must call `close`.
    """

    sampler: Sampler
    sampling: Sampling
    max_model_len: int
    affinity: int  # of the prompt
    rollout: int  # number of the rollout among those of its prompt
    calls: Iterator[int] = field(default_factory=itertools.count)
    session: EngineSession = field(default_factory=EngineSession)

    async def generate(self, prompt_token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        room = self.max_model_len - len(prompt_token_ids)
        if room <= 0:
            return Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")
        sampling = replace(self.sampling, max_tokens=int(min(max_tokens, self.sampling.max_tokens, room)))
        sample = (self.rollout, next(self.calls))
        return await self.sampler.generate(
            prompt_token_ids, sampling, affinity=self.affinity, sample=sample, session=self.session
        )

    def close(self) -> None:
        """Let the engine forget the session."""
        self.sampler.end(self.session)


@dataclass(slots=True, kw_only=True)
class GroupRunner:
    """Answers prompts with the engines and the environments of this process."""

    sampler: Sampler
    runner: AgentRunner
    max_model_len: int  # tokens, prompt and answer together
    rollout_seconds: float  # deadline of one rollout, and before it of the wait for room on this machine
    teachers: Teachers | None = None  # asked about every finished rollout that is trained on

    async def run(self, request: GroupRequest) -> tuple[Rollout, ...]:
        """Return the rollouts of a prompt; raises `EngineError` when no engine is left."""
        clients = [
            PolicyClient(self.sampler, request.sampling, self.max_model_len, request.affinity, rollout)
            for rollout in range(request.num_rollouts)
        ]
        tasks = [asyncio.ensure_future(self._one(request.row, client)) for client in clients]
        try:
            rollouts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the others of one that raised
                task.cancel()
        finished = await self.runner.finish_group(request.row, rollouts)
        if self.teachers is None or not request.is_trained:
            return finished
        return await self.teachers.score(request.row, finished)

    async def _one(self, row: Row, client: PolicyClient) -> Rollout:
        """Run one rollout; one that is late, or of which a request fails, ends without a reward."""
        start = time.monotonic()
        try:
            async with self.runner.reserve(row, seconds=self.rollout_seconds):
                run = self.runner.run(row, client, max_tokens=client.sampling.max_tokens)
                return await asyncio.wait_for(run, timeout=self.rollout_seconds)
        except TimeoutError:
            reason = f"no verdict within {self.rollout_seconds:g} s (deadlines.rollout)"
            status = RolloutStatus.TIMED_OUT
        except RequestError as failure:
            reason, status = str(failure), RolloutStatus.ABORTED
        finally:
            client.close()
        return without_answer(status, reason, seconds=time.monotonic() - start)


def without_answer(status: RolloutStatus, reason: str, *, seconds: float = 0.0) -> Rollout:
    """Return a rollout of which nothing is left but why it failed."""
    return Rollout(turns=(), status=status, reason=reason, reward=None, seconds=seconds)
