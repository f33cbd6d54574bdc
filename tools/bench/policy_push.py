"""The time of weight pushes from a policy to an engine, of plain copies of as many bytes, and of empty calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.config.tree import Config

START_SECONDS = 900.0  # for policy and engine to be up, and for a push: the machine may be busy
STORE_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class PushTimes:
    """Seconds, one of each kind per round; the kinds take turns."""

    pushes: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)  # to the engine and back, without weights: no push is faster


def measure_push(config: Config, num_rounds: int) -> PushTimes:
    """Push the weights of a policy to an engine, copy as many bytes within this process, and call the engine."""
    import numpy as np

    from recipes.cluster.private import private_ray
    from recipes.generation.generation import Generation
    from recipes.generation.serving.requests import AtPush
    from recipes.grpo.loss import grpo_loss
    from recipes.grpo.refit import connect, refit
    from recipes.policy.policy import Policy

    os.environ["OMP_NUM_THREADS"] = "1"
    deadlines = replace(config.deadlines, placement=START_SECONDS, engine_start=START_SECONDS, refit=START_SECONDS)
    times = PushTimes()
    with private_ray(2, object_store_memory=STORE_BYTES):
        loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
        one = [{"num_cpus": 1}]
        policy = Policy.start(config.policy, loss=loss, placement=one, deadlines=deadlines, seed=1)
        generation = Generation.start(
            config.policy.generation,
            model_path=config.policy.model_name,
            seed=1,
            placement=one,
            deadlines=deadlines,
            loads_weights=False,
        )
        connect(policy, generation)
        refit(policy, generation, version=0)  # makes what is made once
        source = np.ones(policy.weight_layout().num_bytes, np.uint8)
        target = np.zeros_like(source)
        for version in range(1, num_rounds + 1):
            times.pushes.append(_seconds(partial(refit, policy, generation, version=version)))
            times.copies.append(_seconds(partial(np.copyto, target, source)))
            generation.at_push = AtPush.DRAIN  # an idle engine answers at once; the next push lets it go on
            times.calls.append(_seconds(generation.drain))
            generation.at_push = AtPush.KEEP
        generation.shutdown()
        policy.shutdown()
    return times


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
