"""A random Qwen3 model, dense or with experts, on one GPU, its configuration and its batches.

The configuration is read without the loader, and nothing here needs Ray or vLLM: a machine with torch, transformers and
megatron-core (its directory on PYTHONPATH is enough) can run the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from random_batch import batch_of, full_rollouts
from torch.distributed import HashStore

from recipes.grpo.loss import grpo_loss
from recipes.types import Rollout
from tests.groups import LocalStore

BASE = Path(__file__).resolve().parents[2] / "configs" / "grpo_base.yaml"
VOCAB = 32768
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
LARGE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 16}  # 0.9 B

EXPERTS = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
EXPERTS |= {"moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 4}


def save_model(directory: Path, sizes: dict[str, int]) -> Path:
    """Write a random model of these sizes in bfloat16, so that both precisions start from equal weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    kind = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if "num_experts" in sizes else (Qwen3Config, Qwen3ForCausalLM)
    config = kind[0](
        **sizes,
        vocab_size=VOCAB,
        num_key_value_heads=sizes["num_attention_heads"] // 2,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model = kind[1](config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def config_of(model: Path, *, precision: str, micro_batch_tokens: int, recompute: bool, is_fused: bool = False) -> Any:
    """Return the published configuration for one GPU; `is_fused` asks for Transformer Engine's optimizer."""
    config = _namespace(yaml.safe_load(BASE.read_text(encoding="utf-8")))
    policy, megatron = config.policy, config.policy.megatron_cfg
    policy.model_name, policy.precision, policy.hf_config_overrides = str(model), precision, {}
    policy.make_sequence_length_divisible_by = 1
    policy.sequence_packing.train_mb_tokens = micro_batch_tokens
    policy.generation.temperature = 1.0
    megatron.tensor_model_parallel_size, megatron.sequence_parallel = 1, False
    megatron.apply_rope_fusion = megatron.moe_permute_fusion = False  # they need Transformer Engine
    megatron.attention_backend = "local"
    megatron.moe_grouped_gemm = False
    megatron.activation_checkpointing = recompute
    megatron.mtp_num_layers = 0
    megatron.optimizer.use_precision_aware_optimizer = is_fused
    megatron.optimizer.lr = megatron.optimizer.min_lr = 1e-4
    megatron.scheduler.start_weight_decay = megatron.scheduler.end_weight_decay = 0.0
    megatron.scheduler.lr_warmup_iters, megatron.scheduler.lr_warmup_init = 0, 0.0
    return config


def offload(config: Any, *, share: float) -> None:
    """Give the CPU a share of the optimizer, with copies that overlap its steps."""
    optimizer = config.policy.megatron_cfg.optimizer
    optimizer.optimizer_cpu_offload, optimizer.optimizer_offload_fraction = True, share
    optimizer.overlap_cpu_optimizer_d2h_h2d = True


def build_trainer(config: Any) -> Any:
    """Build a trainer on this GPU; the one before must be gone, or its memory counts as well."""
    from recipes.policy import parallel, step

    if not torch.distributed.is_initialized():
        cfg = config.policy.megatron_cfg
        parallel.join_groups(HashStore(), rank=0, world_size=1, cfg=cfg, seed=1, timeout_s=60)
    loss = partial(grpo_loss, cfg=config.loss_fn, mismatch_threshold=None)
    return step.build_trainer(config.policy, loss)


def planned_bytes(model: Path, config: Any) -> float:
    """Return the memory that the planner expects of the trainer of one GPU."""
    from tools.sizing.architecture import read_architecture
    from tools.sizing.memory import trainer_memory

    one_gpu: Any = SimpleNamespace(train_gpus=1)
    return trainer_memory(read_architecture(model), config, one_gpu, other=0.0).total


def full_shard(*, tokens: int, width: int, num_microbatches: int = 1) -> Any:
    """Return rows of `width` tokens without padding, `tokens` of them in each micro-batch."""
    rows = tokens // width
    return shard_of(full_rollouts(rows * num_microbatches, width=width, vocab=VOCAB), rows_per_microbatch=rows)


def shard_of(rollouts: Sequence[Rollout], *, rows_per_microbatch: int) -> Any:
    """Return rollouts as what one rank trains on."""
    from recipes.policy.shards import BatchShard

    batch = batch_of(rollouts, LocalStore())
    starts = range(0, len(rollouts), rows_per_microbatch)
    return BatchShard(batch=batch, microbatches=tuple(tuple(range(s, s + rows_per_microbatch)) for s in starts))


@contextmanager
def fresh_memory() -> Any:
    """Free what earlier tests left, and forget their peak."""
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield


def _namespace(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: _namespace(child) for key, child in value.items()})
    return value
