"""A collector over numbered rows. The sampler and the runner are small and deterministic: what is tested is order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from recipes.config.tree import CircuitBreakerConfig
from recipes.generation.clients.router import EngineSession
from recipes.grpo.buffer import ReplayBuffer
from recipes.grpo.data import PromptDataset, PromptStream, RolloutSettings
from recipes.grpo.rollout import RolloutCollector
from recipes.rollouts.group import GroupRunner
from recipes.types import Completion, ModelClient, Rollout, RolloutStatus, Row, Sampling, Turn, VersionSpan
from tests.groups import LocalStore, LocalWorkers

P, G = 2, 3


class Sampler:
    """Answers with three tokens once its gate is open; remembers the order of requests."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.requests: list[tuple[int, Sampling]] = []
        self.failure: Exception | None = None
        self.failures: dict[tuple[int, ...], Exception] = {}  # by sample
        self.samples: set[tuple[int, ...]] = set()

    async def generate(
        self, prompt_token_ids: tuple[int, ...], sampling: Sampling, *, affinity: int, sample: tuple[int, ...], **_: Any
    ) -> Completion:
        self.requests.append((affinity, sampling))
        self.samples.add((affinity, *sample))
        if failure := self.failures.get(sample, self.failure):
            raise failure
        while not self.open.is_set():
            await asyncio.sleep(0.001)
        return Completion(
            token_ids=(1, 2, 3),
            logprobs=(-1.0, -1.0, -1.0),
            versions=(VersionSpan(version=0, start=0, end=3),),
            finish_reason="stop",
        )

    def end(self, _session: EngineSession) -> None: ...


class Runner:
    """Samples once and rewards 1; rows marked `broken` get no verdict, rows marked `slow` never end."""

    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
        answer = await model.generate((5, 6), max_tokens=max_tokens)
        if row.get("slow"):
            await asyncio.sleep(3600)
        turn = Turn(
            prompt_token_ids=(5, 6),
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
        )
        if row.get("broken"):
            return Rollout(turns=(turn,), status=RolloutStatus.ENV_FAILED, reason="env down", reward=None)
        return Rollout(turns=(turn,), status=RolloutStatus.COMPLETED, reason="right", reward=1.0)

    def reserve(self, row: Row, *, seconds: float) -> nullcontext[None]:
        return nullcontext()

    async def finish_group(self, row: Row, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Reward the members of a `compared` row by their place, once all of them are there."""
        if not row.get("compared"):
            return tuple(rollouts)
        await asyncio.sleep(0.01)
        return tuple(replace(rollout, reward=float(place)) for place, rollout in enumerate(rollouts))


class Setup:
    """A collector over numbered rows, and what it is made of."""

    def __init__(self, directory: Path, num_rows: int, *, age: int, marks: dict[int, str] | None = None) -> None:
        path = directory / "train.jsonl"
        rows = [
            {
                "id": index,
                "responses_create_params": {"input": f"question {index}"},
                "agent_ref": {"name": "agent"},
                **({mark: True} if (mark := (marks or {}).get(index)) else {}),
            }
            for index in range(num_rows)
        ]
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        self.stream = PromptStream(PromptDataset(path), num_epochs=1, shuffle=False, seed=0)
        self.age = age
        self.sampler = Sampler()
        self.groups = GroupRunner(sampler=self.sampler, runner=Runner(), max_model_len=16, rollout_seconds=30.0)
        self.buffer = ReplayBuffer(num_prompts_per_step=P, max_trajectory_age_steps=age)
        self.collector = self.new_collector()

    def new_collector(self, *, failures: int = 1, **options: Any) -> RolloutCollector:
        settings = RolloutSettings(
            num_prompts_per_step=P,
            num_generations_per_prompt=G,
            max_trajectory_age_steps=self.age,
            max_generation_failures=failures,
            sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=8),
            max_model_len=16,
            circuit_breaker=CircuitBreakerConfig(window_rollouts=60, max_no_verdict_share=1.0, probe_seconds=60.0),
            **options,
        )
        return RolloutCollector(self.stream, LocalWorkers(self.groups), self.buffer, LocalStore(), settings)

    def take(self, step: int, seconds: float = 5.0) -> list[int]:
        groups = self.buffer.take(step, deadline_seconds=seconds, waiting_for=self.collector.waiting_for)
        return [group.prompt.row_index for group in groups]

    def drawn(self) -> list[int]:
        return sorted({row for row, _ in self.sampler.requests})


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.002)


def make_setups(tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    """Give what makes set-ups, and close them afterwards; for a fixture."""
    made: list[Setup] = []

    def build(num_rows: int, **options: object) -> Setup:
        made.append(Setup(tmp_path, num_rows, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for setup in made:
        setup.collector.close()
