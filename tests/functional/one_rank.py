"""A trainer of one rank in the process of a test, with Megatron's groups for as long as it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from random_batch import random_batch
from torch._C._distributed_c10d import HashStore

from recipes.config.tree import Config
from recipes.grpo.loss import grpo_loss
from recipes.policy import parallel, step
from recipes.policy.shards import BatchShard
from tests.groups import LocalStore


@contextmanager
def one_rank(config: Config) -> Iterator[None]:
    """Form the groups of one rank, and leave them at the end."""
    parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=config.policy.megatron_cfg, seed=1, timeout_s=60.0)
    try:
        yield
    finally:
        from megatron.core import parallel_state  # after recipes.policy, which makes it run on this machine

        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()


def trainer_of(config: Config) -> step.Trainer:
    """Build a trainer from the files of the model."""
    return step.build_trainer(config.policy, partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None))


def shard_of(seed: int, **changes: Any) -> BatchShard:
    """Return a random batch of four rows in two microbatches; `changes` replaces fields of it."""
    batch = replace(random_batch(4, LocalStore(), seed=seed), **changes)
    return BatchShard(batch=batch, microbatches=((0, 1), (2, 3)))
