"""The time of weight pushes from a real policy to a real engine, and of plain copies of as many bytes."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.config.tree import Config

START_SECONDS = 900.0  # for policy and engine to be up, and for a push: the machine may be busy
STORE_BYTES = 100 << 20


def measure_push(config: Config, num_rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of pushes and of copies, round by round; they take turns."""
    import numpy as np
    import ray

    from recipes.generation.generation import Generation
    from recipes.grpo.loss import grpo_loss
    from recipes.grpo.refit import connect, refit
    from recipes.policy.policy import Policy

    os.environ["OMP_NUM_THREADS"] = "1"
    deadlines = replace(config.deadlines, placement=START_SECONDS, engine_start=START_SECONDS, refit=START_SECONDS)
    pushes, copies = [], []
    with tempfile.TemporaryDirectory(prefix="ray-push-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=directory,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
        )
        try:
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
                began = time.perf_counter()
                refit(policy, generation, version=version)
                pushed = time.perf_counter()
                np.copyto(target, source)
                pushes.append(pushed - began)
                copies.append(time.perf_counter() - pushed)
            generation.shutdown()
            policy.shutdown()
        finally:
            ray.shutdown()
    return pushes, copies
