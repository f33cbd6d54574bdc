"""Trains on the same prompts from the same weights in several ways.

    sync and async, each with and without latency
    async, at age 1 and 2, by what becomes of running requests when weights are pushed

One policy and one engine serve all runs; each run has fresh weights and a collector of its own. Each way runs three
times, in turn: a run is compared with its neighbour, so that a slow minute of the machine changes both.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench.verdict import LIMITS, TrainingTimes
from tools.look.report.load import load_run
from tools.look.report.page import phase_seconds, trained

if TYPE_CHECKING:
    from recipes.grpo.run import Run
    from recipes.rollouts.group import GroupRequest

WARMUP_STEPS = 2  # the first step has no overlap yet, and the second still fills the pipeline
NUM_PASSES = 3
PUSH_AGES = (1, 2)
START = "start_weights"
SPREAD = (0.2, 1.8)  # a latency is uniform between these multiples of its mean


class SlowWorkers:
    """Rollout workers whose environments take longer: a group ends after the longest of its rollouts' random waits."""

    def __init__(self, workers: Any, *, mean_seconds: float, seed: int) -> None:
        self._workers = workers
        self._mean_seconds = mean_seconds
        self._random = random.Random(seed)

    async def run_group(self, request: GroupRequest) -> Any:
        """Run the group, then wait."""
        group = await self._workers.run_group(request)
        waits = [self._random.uniform(*SPREAD) for _ in range(request.num_rollouts)]
        await asyncio.sleep(self._mean_seconds * max(waits))
        return group


def measure_training(run: Run, run_dir: Path, *, num_steps: int) -> list[TrainingTimes]:
    """Return the step times of synchronous and asynchronous training at each latency in `LIMITS`, pass by pass.

    Each run takes `num_steps` steps after the warm-up.
    """
    measure_once(run, run_dir, max_age=1, latency=0.0, num_steps=WARMUP_STEPS + 1)  # warm-up of every code path
    start = run_dir / START
    shutil.rmtree(start, ignore_errors=True)
    run.policy.save(start)
    measured = []
    for _, latency, max_age in itertools.product(range(NUM_PASSES), LIMITS, (0, 1)):
        run.policy.load(start)
        measured.append(
            measure_once(run, run_dir, max_age=max_age, latency=latency, num_steps=WARMUP_STEPS + num_steps)
        )
    return measured


def measure_pushes(run: Run, run_dir: Path, *, num_steps: int) -> list[TrainingTimes]:
    """Return the step times and mismatches by what becomes of running requests at a push, age by age, pass by pass.

    The policy's weights at the start are those that `measure_training` has kept.
    """
    from recipes.generation.generation import Generation
    from recipes.generation.serving.requests import AtPush

    generation, measured = run.generation, []
    assert isinstance(generation, Generation)
    before = generation.at_push
    try:
        for _, max_age, at_push in itertools.product(range(NUM_PASSES), PUSH_AGES, AtPush):
            run.policy.load(run_dir / START)
            generation.at_push = at_push
            own, num = run_dir / at_push.value, WARMUP_STEPS + num_steps
            times = measure_once(run, own, max_age=max_age, latency=0.0, num_steps=num)
            measured.append(replace(times, at_push=at_push.value))
    finally:
        generation.at_push = before
    return measured


def measure_once(run: Run, run_dir: Path, *, max_age: int, latency: float, num_steps: int) -> TrainingTimes:
    """Train once with a collector and a log of its own; return the times without those of the warm-up steps."""
    from recipes.grpo.train import train

    name = f"age{max_age}_{latency:g}s"
    mine = _variant(run, run_dir / name, max_age=max_age, latency=latency, num_steps=num_steps)
    try:
        train(mine)
    finally:
        mine.collector.close()
        mine.recorder.logger.close()
    records = trained(load_run(run_dir / name))[WARMUP_STEPS:]
    phases = [phase_seconds(record) for record in records]
    return TrainingTimes(
        max_age=max_age,
        latency=latency,
        step_seconds=tuple(record.values["timing/train/total_step_time"] for record in records),
        phase_seconds={phase: tuple(one.get(phase, 0.0) for one in phases) for phase in phases[0]},
        generated_tokens=tuple(record.values["train/gen_tokens_per_sample/mean"] for record in records),
        mismatch=tuple(record.values["train/token_mult_prob_error"] - 1.0 for record in records),
    )


def _variant(run: Run, run_dir: Path, *, max_age: int, latency: float, num_steps: int) -> Run:
    """Return a run of `num_steps` steps on the same policy and engine, with a collector and a log of its own."""
    from recipes.grpo.buffer import ReplayBuffer
    from recipes.grpo.checkpoint import TrainState
    from recipes.grpo.data import PromptDataset, PromptStream
    from recipes.grpo.log import Recorder, RunLogger
    from recipes.grpo.rollout import RolloutCollector

    base = run.config
    grpo = replace(
        base.grpo,
        async_grpo=replace(base.grpo.async_grpo, max_trajectory_age_steps=max_age),
        val_period=0,
        val_at_start=False,
        val_at_end=False,
    )
    config = replace(base, grpo=grpo, checkpointing=replace(base.checkpointing, enabled=False))
    rows = PromptDataset(Path(base.data.train.data_path))
    stream = PromptStream(rows, num_epochs=base.grpo.max_num_epochs, shuffle=base.data.shuffle, seed=base.grpo.seed)
    buffer = ReplayBuffer(num_prompts_per_step=base.grpo.num_prompts_per_step, max_trajectory_age_steps=max_age)
    workers: Any = run.workers
    if latency:
        workers = SlowWorkers(workers, mean_seconds=latency, seed=base.grpo.seed)
    settings = replace(run.collector.settings, max_trajectory_age_steps=max_age)
    logger, state = RunLogger(run_dir, base.logger, num_steps=num_steps), TrainState()
    logger.resume(0)
    collector = RolloutCollector(stream, workers, buffer, run.collector.token_store, settings)
    recorder = Recorder(
        config=config,
        logger=logger,
        state=state,
        generation=run.generation,
        workers=run.workers,
        collector=collector,
    )
    saver = replace(
        run.saver, config=config, root=run_dir / "checkpoints", collector=collector, recorder=recorder, state=state
    )
    return replace(
        run,
        config=config,
        collector=collector,
        buffer=buffer,
        validation=None,
        recorder=recorder,
        saver=saver,
        state=state,
        num_steps=num_steps,
    )
