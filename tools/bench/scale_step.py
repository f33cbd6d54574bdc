"""One step on random tokens: from the first prompt that is drawn to the first packed microbatch of every rank."""

from __future__ import annotations

import json
import pickle
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from recipes.config.tree import Config
    from recipes.policy.shards import BatchShard
    from recipes.types import Group, TrainBatch

ROLLOUTS_PER_PROMPT = 16
MEAN_TOKENS, MOST_TOKENS = 9_300, 65_024  # of an answer
MODEL_TOKENS = 131_072  # that the context holds
STEP_SECONDS = 900.0  # of a real step of this size
WAIT_SECONDS = 580.0  # for the rollouts of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """One step that is measured."""

    num_prompts: int
    mean_tokens: int  # of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step cost."""

    size: StepSize
    num_tokens: int
    driver_cpu_seconds: float  # of the whole process, from the first prompt drawn to the calls of the ranks
    plan_cpu_seconds: float  # part of it that is spent on the full buffer
    driver_bytes: int  # prompts that went, headers that came, shards that went
    driver_memory_bytes: int  # by which the largest size of the driver has grown
    worker_cpu_seconds: float  # of rollout workers with their scoring processes
    engine_cpu_seconds: float  # to make random tokens, and to send and receive
    first_microbatch_seconds: float  # from the last rollout to the first packed microbatch of the last rank
    spread: float  # generated tokens of the busiest engine over their mean
    wall_seconds: float

    def row(self) -> tuple[str, ...]:
        """Return the cells of the printed table."""
        return (
            str(self.size.num_prompts * ROLLOUTS_PER_PROMPT),
            f"{self.num_tokens / 1e6:.2f} M",
            f"{self.driver_cpu_seconds:.2f} s",
            f"{self.driver_cpu_seconds / STEP_SECONDS:.2%}",
            f"{self.plan_cpu_seconds:.2f} s",
            f"{self.driver_bytes / 1e6:.2f} MB",
            f"{self.driver_memory_bytes / 1e6:.0f} MB",
            f"{self.first_microbatch_seconds:.2f} s",
            f"{self.worker_cpu_seconds / self.num_tokens * 1e6:.2f} us",
            f"{self.spread:.2f}",
            f"{self.wall_seconds:.0f} s",
        )


HEADS = (
    "rollouts",
    "tokens",
    "driver CPU",
    "of 15 min",
    "planning",
    "driver bytes",
    "driver grew",
    "to first microbatch",
    "workers a token",
    "engines max/mean",
    "wall",
)


class Rank:
    """A rank of the policy without a model: it fetches its rows and packs its first microbatch."""

    def __init__(self, multiple: int) -> None:
        from recipes.policy import step  # loaded before anything is measured, as in a rank that has a model

        self._multiple = multiple
        self._loss_inputs = step.loss_inputs

    def first_microbatch(self, shard: BatchShard) -> float:
        """Return the time, on the machine's own clock, at which the first microbatch and its loss inputs were ready."""
        import torch

        from recipes.cluster.token_store import RayTokenStore
        from recipes.policy.microbatch import pack_microbatch

        fetched, rows = shard.fetched(RayTokenStore()), shard.microbatches[0]
        packed = pack_microbatch(
            [fetched.row(row).token_ids for row in rows],
            rows,
            multiple=self._multiple,
            row_multiple=1,
            where=torch.device("cpu"),
        )
        self._loss_inputs(fetched, packed, torch.zeros(packed.tokens_1T.shape))
        return time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all steps share."""

    config: Config  # of the stage whose step is planned
    rows: Path
    workers: Any
    generation: Any
    engines: Sequence[Any]
    ranks: Sequence[Any]


def write_inputs(place: Path, num_rows: int) -> None:
    """Write a tokenizer and rows of one turn whose agents and verifiers are real."""
    from tools.tiny.model import build_tokenizer
    from tools.tiny.tasks import TASKS, make_row

    build_tokenizer().save_pretrained(place / "model")
    rng = Random(0)
    tasks = [TASKS[number % len(TASKS)] for number in range(num_rows)]
    rows = [{**make_row(task, task.draw(rng)), "uuid": number} for number, task in enumerate(tasks)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measure(size: StepSize, parts: Parts) -> StepCost:
    """Take one step up to the first microbatch of every rank."""
    import ray

    from recipes.grpo.buffer import ReplayBuffer

    ray.get([engine.set_mean.remote(size.mean_tokens) for engine in parts.engines], timeout=60)
    generated = [engine["generated_tokens"] for engine in parts.generation.stats()]
    buffer = ReplayBuffer(num_prompts_per_step=size.num_prompts, max_trajectory_age_steps=0)
    collector = _collector(size, parts, buffer)
    memory, workers, engines = _largest(), cpu_seconds("ray::RolloutWorker"), cpu_seconds("ray::RandomEngine")
    began, began_cpu = time.monotonic(), time.process_time()
    collector.start(version=0, last_step=1)
    groups = buffer.take(0, deadline_seconds=WAIT_SECONDS, waiting_for=collector.waiting_for)
    last_rollout, full_cpu = time.monotonic(), time.process_time()
    shards = _shards(groups, parts.config, num_ranks=len(parts.ranks))
    calls = [rank.first_microbatch.remote(shard) for rank, shard in zip(parts.ranks, shards, strict=True)]
    end_cpu, memory = time.process_time(), _largest() - memory
    ready = max(ray.get(calls, timeout=120))
    now = [engine["generated_tokens"] for engine in parts.generation.stats()]
    given = [after - before for before, after in zip(generated, now, strict=True)]
    cost = StepCost(
        size=size,
        num_tokens=sum(rollout.num_tokens for group in groups for rollout in group.rollouts),
        driver_cpu_seconds=end_cpu - began_cpu,
        plan_cpu_seconds=end_cpu - full_cpu,
        driver_bytes=_bytes_of_rows(parts.rows, size.num_prompts)
        + sum(len(pickle.dumps(one.rollouts)) for one in groups)
        + sum(_pickled(shard) for shard in shards),
        driver_memory_bytes=memory,
        worker_cpu_seconds=cpu_seconds("ray::RolloutWorker") - workers,
        engine_cpu_seconds=cpu_seconds("ray::RandomEngine") - engines,
        first_microbatch_seconds=ready - last_rollout,
        spread=max(given) * len(given) / sum(given),
        wall_seconds=ready - began,
    )
    collector.close()
    return cost


def _collector(size: StepSize, parts: Parts, buffer: Any) -> Any:
    from recipes.cluster.token_store import RayTokenStore
    from recipes.grpo.data import PromptDataset, PromptStream, RolloutSettings
    from recipes.grpo.rollout import RolloutCollector
    from recipes.types import Sampling

    stream = PromptStream(PromptDataset(parts.rows), num_epochs=1, shuffle=False, seed=0)
    settings = RolloutSettings(
        num_prompts_per_step=size.num_prompts,
        num_generations_per_prompt=ROLLOUTS_PER_PROMPT,
        max_trajectory_age_steps=0,
        max_generation_failures=1,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=MOST_TOKENS),
        max_model_len=MODEL_TOKENS,
        circuit_breaker=parts.config.env.circuit_breaker,
    )
    return RolloutCollector(stream, parts.workers, buffer, RayTokenStore(), settings)


def _shards(groups: Sequence[Group], config: Config, *, num_ranks: int) -> list[BatchShard]:
    """Do with a step's groups what the train loop and the policy's handle do before the ranks are called."""
    from recipes.grpo.advantage import add_advantages
    from recipes.grpo.batch import build_batch
    from recipes.grpo.reward import collect_rewards
    from recipes.policy.shards import divide, split

    rewards_B, _ = collect_rewards(groups, config)
    batch: TrainBatch = build_batch(groups, rewards_B, overlong_filtering=False, mask_flagged=True)
    batch, _ = add_advantages(batch, groups, config)
    return split(batch, divide(batch, config.policy, num_shards=num_ranks, training=True))


def _pickled(shard: BatchShard) -> int:
    import ray.cloudpickle

    return len(ray.cloudpickle.dumps(shard))


def _bytes_of_rows(rows: Path, count: int) -> int:
    with rows.open("rb") as lines:
        return sum(len(line) for _, line in zip(range(count), lines, strict=False))


def _largest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds(title: str) -> float:
    """Return the CPU seconds so far of this process's descendants with a title, and of everything below them."""
    found, seconds = set[psutil.Process](), 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if " ".join(process.cmdline()).startswith(title):
                found |= {process, *process.children(recursive=True)}
    for process in found:
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
