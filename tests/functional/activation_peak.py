"""Print the bytes that one step of the tiny policy allocates at its peak, and what the planner says of them.

Run by test_memory.py in a process of its own, because Megatron's process groups are per process:
activation_peak.py MODEL_DIR (true|false), the latter for activation_checkpointing.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

from random_batch import batch_of, full_rollouts
from torch.distributed import HashStore
from torch.profiler import ProfilerActivity, profile

from recipes.config.keys.derive import derive
from recipes.config.load import load_config, require_valid
from recipes.grpo.loss import grpo_loss
from recipes.policy import parallel, step
from recipes.policy.shards import BatchShard
from tests.groups import LocalStore
from tools.sizing.architecture import read_architecture
from tools.sizing.memory import trainer_memory

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny" / "stage1_rlvr.yaml"
NUM_ROWS, WIDTH = 64, 64  # 4096 tokens: one full micro-batch


def full_batch(vocab: int) -> BatchShard:
    """Return rows without padding, all in one micro-batch."""
    batch = batch_of(full_rollouts(NUM_ROWS, width=WIDTH, vocab=vocab), LocalStore())
    return BatchShard(batch=batch, microbatches=(tuple(range(NUM_ROWS)),))


def peak_bytes(trainer: step.Trainer, shard: BatchShard) -> int:
    """Return how much more than before is allocated at the worst moment of a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.train_step(trainer, shard)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    """Measure and print both numbers as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    model, recompute = Path(sys.argv[1]), sys.argv[2]
    overrides = [f"policy.model_name={model}", f"policy.megatron_cfg.activation_checkpointing={recompute}"]
    config = require_valid(load_config(CONFIG, overrides))
    parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=config.policy.megatron_cfg, seed=1, timeout_s=60)
    trainer = step.build_trainer(config.policy, partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None))
    architecture = read_architecture(model)
    shard = full_batch(architecture.vocab)
    step.train_step(trainer, shard)  # makes what is made once
    expected = trainer_memory(architecture, config, derive(config), other=0.0)
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    print(
        json.dumps(
            {
                "peak": peak_bytes(trainer, shard),
                "expected": expected.activations + expected.logits,
                "parameters": parameters,
                "weights": expected.weights,
            }
        )
    )


if __name__ == "__main__":
    main()
