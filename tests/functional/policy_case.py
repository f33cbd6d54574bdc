"""A tiny Qwen3 checkpoint, its configuration and random batches, for the tests of the policy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file
from speed import patiently
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from recipes.cluster.private import private_ray
from recipes.config.load import load_config, require_valid
from recipes.config.tree import Config
from recipes.grpo.advantage import algorithm_of
from recipes.policy.policy import Policy
from recipes.policy.shards import BatchShard
from recipes.tokens import TokenStore
from recipes.types import TrainBatch

BASE = Path(__file__).resolve().parents[2] / "configs" / "grpo_base.yaml"
GRADIENT_SCALE = 1e3

_CPU = {
    "policy.precision": "float32",
    "policy.max_total_sequence_length": 64,
    "policy.train_micro_batch_size": 2,
    "policy.logprob_batch_size": 4,
    "policy.megatron_cfg.sequence_parallel": "false",
    "policy.megatron_cfg.tensor_model_parallel_size": 1,
    "policy.megatron_cfg.activation_checkpointing": "false",
    "policy.megatron_cfg.attention_backend": "local",
    "policy.megatron_cfg.apply_rope_fusion": "false",
    "policy.megatron_cfg.moe_grouped_gemm": "false",
    "policy.megatron_cfg.moe_permute_fusion": "false",
    "policy.megatron_cfg.mtp_num_layers": 0,
    "policy.megatron_cfg.freeze_moe_router": "false",
    "policy.megatron_cfg.optimizer.lr": 1.0e-3,
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer": "false",
    "policy.megatron_cfg.optimizer.bf16": "false",
    "policy.megatron_cfg.scheduler.lr_warmup_init": 1.0e-4,
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 2,
}


def save_model(directory: Path, *, family: str = "qwen3", tied: bool = False, **sizes: Any) -> Path:
    """Write a random dense model with grouped queries, in float32; `family` is its `model_type`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_theta": 1e6,
            "tie_word_embeddings": tied,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.2,  # large enough that every weight matters
            **sizes,
        },
    )
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():  # biases start at 0, where a wrong place would not show
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_(std=0.5)
    model.save_pretrained(directory)
    return directory


def save_experts(directory: Path, **sizes: Any) -> Path:
    """Write a random Qwen3 model with a mixture of experts in every layer, in float32."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 48,
            "moe_intermediate_size": 32,
            "intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.2,
            **sizes,
        }
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():  # routers start at 0, where the choice of experts would be a tie
        for name, value in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                value.normal_(std=0.3)
    model.save_pretrained(directory)
    return directory


def save_hybrid(directory: Path, **sizes: Any) -> Path:
    """Write a random Nemotron-H model with all four kinds of layer and latent experts, in float32."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 48,
            "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention", "moe"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 80,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 4,
            "chunk_size": 16,
            "conv_kernel": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": 48,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "routed_scaling_factor": 2.5,
            "time_step_min": 1e-30,  # transformers bounds the step from below, the model does not
            **sizes,
        }
    )
    model = NemotronHForCausalLM(config).float()
    with torch.no_grad():  # every weight away from its starting value, so that a wrong place shows
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(value.shape)
            if "e_score_correction_bias" in name:
                value.copy_(0.3 * noise)
            elif "norm" in name:
                value.copy_(1 + 0.2 * noise)
            elif name.endswith((".D", "A_log")):
                value.add_(0.3 * noise)
            elif name.endswith("dt_bias"):
                value.copy_(1.5 * noise - 2)
            elif "embeddings" in name or "conv1d" in name:
                value.copy_(0.5 * noise)
    model.save_pretrained(directory)
    return directory


def load_case(model: Path, **overrides: Any) -> Config:
    """Return the base configuration for CPU workers; a dot of an overridden `policy` key is written as `__`."""
    values = _CPU | {f"policy.{key.replace('__', '.')}": value for key, value in overrides.items()}
    texts = [f"{key}={value}" for key, value in values.items()]
    return require_valid(load_config(BASE, [f"policy.model_name={model}", *texts]))


def showing_gradients(config: Config) -> Config:
    """Give Adam a huge epsilon, so that one step moves every weight by -GRADIENT_SCALE times its gradient.

    The weights then show the gradients that the optimizer was given, after the same reductions as in training.
    """
    megatron = config.policy.megatron_cfg
    megatron = replace(
        megatron,
        optimizer=replace(megatron.optimizer, lr=1e9, min_lr=1e9, adam_eps=1e9 / GRADIENT_SCALE),
        scheduler=replace(megatron.scheduler, lr_warmup_iters=0, lr_warmup_init=0.0),
    )
    return replace(config, policy=replace(config.policy, megatron_cfg=megatron, max_grad_norm=1e9))


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """Run a Ray instance of our own, in a directory of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with private_ray(num_cpus, object_store_memory=100 * 2**20):
        yield


@contextmanager
def running(config: Config, *, num_ranks: int = 1, **deadlines: float) -> Iterator[Policy]:
    """Start a policy with one CPU per rank and stop it at the end."""
    limits = replace(
        config.deadlines, **({"placement": patiently(60), "engine_start": patiently(180), "shutdown": 5.0} | deadlines)
    )
    policy = Policy.start(
        config.policy,
        loss=partial(algorithm_of(config).loss, cfg=config.loss_fn, mismatch_threshold=None),
        placement=[{"num_cpus": 1}] * num_ranks,
        deadlines=limits,
        seed=1,
        reference=algorithm_of(config).reference(config),
    )
    try:
        yield policy
    finally:
        policy.shutdown()


def exported(policy: Policy, directory: Path) -> dict[str, torch.Tensor]:
    """Export the policy and read the tensors back."""
    policy.export_hf(directory)
    return load_file(directory / "model.safetensors")


def policy_logprobs(policy: Policy, batch: TrainBatch) -> Tensor:
    """Return the policy's log-probabilities, all rows end to end."""
    return torch.cat(policy.logprobs(batch))


def token_ids(batch: TrainBatch, store: TokenStore) -> list[Tensor]:
    """Fetch the tokens of a batch, row by row."""
    shard = BatchShard(batch=batch, microbatches=()).fetched(store)
    return [torch.tensor(shard.row(row).token_ids, dtype=torch.int64) for row in range(len(batch.lengths_B))]


def loss_mask(batch: TrainBatch, store: TokenStore) -> Tensor:
    """Return 1 for every token in the loss, all rows end to end."""
    shard = BatchShard(batch=batch, microbatches=()).fetched(store)
    masks = batch.sample_mask_B.tolist()
    return torch.cat([torch.tensor(shard.row(row).token_mask()) * mask for row, mask in enumerate(masks)])


def reference_logprobs(model: Path, batch: TrainBatch, store: TokenStore, *, temperature: float = 1.0) -> Tensor:
    """Compute the same with transformers, one row at a time."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = []
    for ids in token_ids(batch, store):
        with torch.no_grad():
            scores = (reference(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), scores.gather(-1, ids[1:, None])[:, 0]]))
    return torch.cat(rows)


def lost_reference() -> Any:
    """Return the reference of what is in no object store: the process that was to make it has died."""

    @ray.remote(num_cpus=0, max_retries=0)
    def die() -> None:
        os._exit(1)

    reference = die.remote()
    ray.wait([reference], timeout=patiently(60))
    return reference
