"""Take a snapshot of a tiny policy, train on, write it, load it: training must go on as if it had been written at once.

It lies in the memory of an earlier snapshot that was written.

Run by test_policy.py in a process of its own, because Megatron's process groups are per process:
snapshot_case.py DIRECTORY (true|false), the latter for use_distributed_optimizer.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
from policy_case import load_case, save_model
from random_batch import random_batch
from torch.distributed import HashStore

from recipes.grpo.loss import grpo_loss
from recipes.policy import checkpoint, parallel, step
from recipes.policy.host_copies import HostCopies
from recipes.policy.shards import BatchShard
from tests.groups import LocalStore


def main() -> None:
    """Compare the steps after the snapshot with the same steps after loading it; exits with an error if they differ."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    directory, is_distributed = Path(sys.argv[1]), sys.argv[2]
    config = load_case(
        save_model(directory / "model"),
        megatron_cfg__optimizer__use_distributed_optimizer=is_distributed,
        megatron_cfg__distributed_data_parallel_config__overlap_param_gather=is_distributed,
    )
    parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=config.policy.megatron_cfg, seed=1, timeout_s=60)
    trainer = step.build_trainer(config.policy, partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None))
    batches = [random_batch(4, LocalStore(), seed=seed) for seed in range(3)]
    first, *later = [BatchShard(batch=batch, microbatches=((0, 1), (2, 3))) for batch in batches]

    def go_on() -> tuple[list[object], dict[str, torch.Tensor]]:
        metrics = [step.train_steps(trainer, [shard]) for shard in later]
        return metrics, {name: tensor.clone() for name, tensor in trainer.export()}

    copies = HostCopies()
    earlier, path = directory / "earlier", directory / "checkpoint"
    for place in (earlier, path):
        place.mkdir()
    write(checkpoint.snapshot(trainer, earlier, copies))
    step.train_steps(trainer, [first])
    taken = checkpoint.snapshot(trainer, path, copies)
    straight = go_on()
    write(taken)
    checkpoint.load(trainer, path)
    resumed = go_on()
    assert resumed[0] == straight[0]
    assert all(torch.equal(resumed[1][name], tensor) for name, tensor in straight[1].items())


def write(taken: checkpoint.Snapshot) -> None:
    taken.write()
    taken.finish()


if __name__ == "__main__":
    main()
