"""How long training stands still for a checkpoint of a real policy, and how long writing it takes."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.errors import RunError

if TYPE_CHECKING:
    from recipes.config.tree import Config
    from recipes.policy.policy import Policy
    from recipes.types import TrainBatch

START_SECONDS = 1800.0  # for the policy to be up, and for a save: the machine may be busy
STORE_BYTES = 100 << 20


def measure_save(config: Config, batch: TrainBatch, num_rounds: int, place: Path) -> tuple[list[float], list[float]]:
    """Return the seconds that training stood still, and those of writing, save by save into `place`.

    A save has weights, optimizer and the export, as a run's has. `batch` is trained once before, as the optimizer has
    no state before its first step; its arrays lie in this process.
    """
    from recipes.cluster.private import private_ray
    from recipes.cluster.token_store import RayTokenStore
    from recipes.grpo.loss import grpo_loss
    from recipes.policy.policy import Policy

    os.environ["OMP_NUM_THREADS"] = "1"
    deadlines = replace(config.deadlines, placement=START_SECONDS, engine_start=START_SECONDS, checkpoint=START_SECONDS)
    stood, wrote = [], []
    with private_ray(2, object_store_memory=STORE_BYTES):
        loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
        policy = Policy.start(config.policy, loss=loss, placement=[{"num_cpus": 1}], deadlines=deadlines, seed=1)
        store = RayTokenStore()
        policy.train(replace(batch, tokens=tuple(store.put(tokens) for tokens in batch.tokens)))
        for number in range(num_rounds):
            began, seconds = _save(policy, place / f"save{number}")
            stood.append(began)
            wrote.append(seconds)
            shutil.rmtree(place / f"save{number}")
        policy.shutdown()
    return stood, wrote


def _save(policy: Policy, path: Path) -> tuple[float, float]:
    began = time.perf_counter()
    policy.begin_save(path / "policy", path / "hf")
    stood = time.perf_counter() - began
    while not policy.is_save_written():
        if time.perf_counter() - began > START_SECONDS:
            raise RunError(f"bench-policy: a save was not written within {START_SECONDS:g} s")
        time.sleep(0.05)
    began = time.perf_counter()
    wrote = policy.finish_save()
    return stood + time.perf_counter() - began, wrote
