"""Print the bytes that one step of a tiny policy allocates at its peak, and what the planner says of them.

Run by test_memory.py in a process of its own, because Megatron's process groups are per process:
activation_peak.py FOLDER SHAPE... makes a model of each shape in the folder; one line of JSON for each, with and
without recomputation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from policy_case import save_experts, save_hybrid, save_model
from random_batch import batch_of, full_rollouts
from torch.distributed import HashStore
from torch.profiler import ProfilerActivity, profile

from recipes.config.keys.derive import derive
from recipes.config.load import load_config, require_valid
from recipes.grpo.advantage import algorithm_of
from recipes.policy import parallel, step
from recipes.policy.shards import BatchShard
from tests.groups import LocalStore
from tools.sizing.architecture import read_architecture
from tools.sizing.memory import trainer_memory
from tools.tiny.heads import add_heads

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny" / "stage1_rlvr.yaml"
NUM_ROWS, WIDTH = 64, 64  # 4096 tokens: one full micro-batch
_COMMON = {"vocab_size": 512, "hidden_size": 128, "head_dim": 32}
# Few Mamba heads: on a CPU the stand-in for their kernels keeps more than these do.
_HYBRID = _COMMON | {"mamba_num_heads": 2, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 32}
_LATENT = ["linear_attention", "moe", "full_attention", "linear_attention", "moe", "full_attention"]
_ROUTED = {"moe_intermediate_size": 128, "moe_latent_size": 64, "moe_shared_expert_intermediate_size": 192}
TRAINED = {"policy.megatron_cfg.mtp_num_layers": 3}
KINDS: dict[str, dict[str, Any]] = {  # of training, by the end of a shape's name
    "-heads": TRAINED,
    "-healing": TRAINED | {"policy.megatron_cfg.freeze_trunk": "true"},
}


def save_with_heads(path: Path, **sizes: Any) -> Path:
    return add_heads(save_hybrid(path, **sizes))


SHAPES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "dense": (save_model, _COMMON | {"intermediate_size": 384, "num_hidden_layers": 4}),
    "dense-wide": (save_model, _COMMON | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}),
    "dense-vocabulary": (save_model, _COMMON | {"vocab_size": 2048, "intermediate_size": 384}),
    "experts": (save_experts, _COMMON | {"moe_intermediate_size": 96, "num_hidden_layers": 4}),
    "experts-many": (
        save_experts,
        _COMMON | {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4},
    ),
    "experts-wide": (
        save_experts,
        _COMMON | {"hidden_size": 192, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "hybrid": (save_hybrid, _HYBRID | _ROUTED | {"layers_block_type": _LATENT, "num_experts_per_tok": 2}),
    "hybrid-heads": (save_with_heads, _HYBRID | _ROUTED | {"layers_block_type": _LATENT, "num_experts_per_tok": 2}),
    "hybrid-healing": (save_with_heads, _HYBRID | _ROUTED | {"layers_block_type": _LATENT, "num_experts_per_tok": 2}),
    "hybrid-plain": (
        save_hybrid,
        _HYBRID | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "intermediate_size": 512},
    ),
    "hybrid-wide": (
        save_hybrid,
        _HYBRID | _ROUTED | {"hidden_size": 192, "moe_latent_size": None, "layers_block_type": _LATENT[1:5]},
    ),
}


def full_batch(vocab: int) -> BatchShard:
    """Return rows without padding, all in one micro-batch."""
    batch = batch_of(full_rollouts(NUM_ROWS, width=WIDTH, vocab=vocab), LocalStore())
    return BatchShard(batch=batch, microbatches=(tuple(range(NUM_ROWS)),))


def peak_bytes(trainer: step.Trainer, shard: BatchShard) -> int:
    """Return how much more than before is allocated at the worst moment of a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.train_steps(trainer, [shard])
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def measured(model: Path, *, recompute: bool) -> dict[str, object]:
    """Take two steps of a model; the first makes what is made once."""
    flag = f"policy.megatron_cfg.activation_checkpointing={str(recompute).lower()}"
    kind = next((own for end, own in KINDS.items() if model.name.endswith(end)), {})
    overrides = [f"{key}={value}" for key, value in kind.items()]
    config = require_valid(load_config(CONFIG, [f"policy.model_name={model}", flag, *overrides]))
    if not torch.distributed.is_initialized():
        parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=config.policy.megatron_cfg, seed=1, timeout_s=60)
    loss = partial(algorithm_of(config).loss, cfg=config.loss_fn, mismatch_threshold=None)
    trainer = step.build_trainer(config.policy, loss)
    architecture = read_architecture(model)
    shard = full_batch(architecture.vocab)
    step.train_steps(trainer, [shard])
    heads = [] if trainer.heads is None else trainer.heads.parameters()
    weights = [*trainer.model.parameters(), *heads]
    expected = trainer_memory(architecture, config, derive(config), other=0.0)
    return {
        "shape": model.name,
        "recompute": recompute,
        "peak": peak_bytes(trainer, shard),
        "expected": expected.activations + expected.backward,
        "parameters": sum(weight.numel() * weight.element_size() for weight in weights),
        "weights": expected.weights,
    }


def main() -> None:
    """Measure and print."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        save, sizes = SHAPES[name]
        model = save(Path(sys.argv[1]) / name, **sizes)
        for recompute in (True, False):
            print(json.dumps(measured(model, recompute=recompute)), flush=True)


if __name__ == "__main__":
    main()
