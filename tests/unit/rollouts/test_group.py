"""One group on a sampler that fails as a whole: its other rollouts end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from recipes.config.keys.derive import TEACHER_OF_ALL
from recipes.environments.scoring.judge import JudgeFailedError
from recipes.errors import EngineError
from recipes.generation.clients.router import EngineSession
from recipes.rollouts.group import GroupRequest, GroupRunner
from recipes.rollouts.teachers import Teachers
from recipes.types import Completion, ModelClient, Rollout, RolloutStatus, Row, Sampling, Turn

TURN = Turn(prompt_token_ids=(1,), token_ids=(2, 3), logprobs=(-1.0, -1.0), versions=(), finish_reason="stop")


class Sampler:
    """Fails for the last rollout; the others would wait for ever."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    async def generate(
        self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, affinity: int, sample: tuple[int, ...], **_: Any
    ) -> Completion:
        if sample[0] == 2:
            raise EngineError("no generation engine is left")
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(sample[0])
        raise AssertionError("nothing sets the event")

    def end(self, _session: EngineSession) -> None: ...


class Runner:
    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
        await model.generate((1,), max_tokens=max_tokens)
        raise AssertionError("nothing is sampled")

    def reserve(self, row: Row, *, seconds: float) -> nullcontext[None]:
        return nullcontext()

    async def finish_group(self, row: Row, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        return tuple(rollouts)


async def test_the_other_rollouts_end_when_no_engine_is_left() -> None:
    sampler = Sampler()
    groups = GroupRunner(sampler=sampler, runner=Runner(), max_model_len=16, rollout_seconds=60.0)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
    with pytest.raises(EngineError):
        await groups.run(GroupRequest(row={}, sampling=sampling, affinity=0, num_rollouts=3))
    for _ in range(8):
        await asyncio.sleep(0)
    assert sampler.ended == [0, 1]


class Answering(Runner):
    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
        return Rollout(turns=(TURN,), status=RolloutStatus.COMPLETED, reason="", reward=1.0)


class Refusing:
    """A teacher that has no answer."""

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        raise JudgeFailedError("it is away")


async def test_no_teacher_is_asked_about_what_is_not_trained_on() -> None:
    teachers: Any = Teachers({TEACHER_OF_ALL: Refusing()})  # type: ignore[dict-item]
    groups = GroupRunner(
        sampler=Sampler(), runner=Answering(), max_model_len=16, rollout_seconds=60.0, teachers=teachers
    )
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
    request = GroupRequest(row={}, sampling=sampling, affinity=0, num_rollouts=2)
    trained, held_out = await groups.run(request), await groups.run(replace(request, is_trained=False))
    assert [one.is_valid for one in (*trained, *held_out)] == [False, False, True, True]
