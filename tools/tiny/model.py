"""Tiny models of about a million parameters with seeded random weights: Nemotron-H, Qwen3, with experts or without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tools.tiny.tokenizer import MAX_TOKENS

# Two layers of each kind that a Nemotron 3 Super has.
HYBRID_LAYERS = ("linear_attention", "moe", "full_attention", "linear_attention", "moe", "full_attention")
HYBRID_LAYERS_WITHOUT_EXPERTS = tuple("mlp" if kind == "moe" else kind for kind in HYBRID_LAYERS)
VOCABULARY_MULTIPLE = 64  # so that the vocabulary splits over tensor-parallel ranks
SHARED = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention supports only multiples of 32
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "dtype": "float32",
}


def build_model(tokenizer: Any, *, seed: int) -> Any:
    """Return an untrained dense Qwen3 in float32 for `tokenizer`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**SHARED, **_of(tokenizer), num_hidden_layers=4, rope_theta=10000.0)
    return _seeded(Qwen3ForCausalLM, config, seed)


def build_model_with_experts(tokenizer: Any, *, seed: int) -> Any:
    """Return an untrained Qwen3 with experts in float32 for `tokenizer`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SHARED,
        **_of(tokenizer),
        num_hidden_layers=4,
        rope_theta=10000.0,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
    )
    return _seeded(Qwen3MoeForCausalLM, config, seed)


def build_hybrid_model(tokenizer: Any, *, seed: int, layers: tuple[str, ...] = HYBRID_LAYERS) -> Any:
    """Return an untrained Nemotron-H in float32 for `tokenizer`; its experts, if it has any, are latent."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **SHARED,
        **_of(tokenizer),
        layers_block_type=list(layers),
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=32,
        conv_kernel=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=128,
        moe_latent_size=64,
        moe_shared_expert_intermediate_size=192,
        routed_scaling_factor=2.5,
        time_step_min=1e-30,  # transformers bounds the step of the state from below, Megatron and vLLM do not
    )
    return _seeded(NemotronHForCausalLM, config, seed)


def _of(tokenizer: Any) -> dict[str, int]:
    vocabulary = -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"vocab_size": vocabulary, **special}


def _seeded(model: Any, config: Any, seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    return model(config).float()


BUILDERS: dict[str, Callable[..., Any]] = {  # by the name that MODEL of the Makefile has
    "nemotron-h": build_hybrid_model,
    "nemotron-dense": partial(build_hybrid_model, layers=HYBRID_LAYERS_WITHOUT_EXPERTS),
    "qwen3": build_model,
    "qwen3-moe": build_model_with_experts,
}
