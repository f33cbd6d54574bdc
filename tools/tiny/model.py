"""Tiny models of about a million parameters with seeded random weights: a dense Qwen3 decoder, and a Nemotron-H."""

from __future__ import annotations

from typing import Any

from tools.tiny.tokenizer import MAX_TOKENS

# Two layers of each kind that a Nemotron 3 Super has.
HYBRID_LAYERS = ("linear_attention", "moe", "full_attention", "linear_attention", "moe", "full_attention")
VOCABULARY_MULTIPLE = 64  # so that the vocabulary splits over tensor-parallel ranks
INITIAL_STD = 0.05  # of the initial weights


def build_model(tokenizer: Any, *, seed: int) -> Any:
    """Return an untrained float32 model for `tokenizer`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=_vocabulary(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU attention supports only multiples of 32
        max_position_embeddings=MAX_TOKENS,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=INITIAL_STD,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float()


def build_hybrid_model(tokenizer: Any, *, seed: int) -> Any:
    """Return an untrained float32 Nemotron-H with latent experts for `tokenizer`."""
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        vocab_size=_vocabulary(tokenizer),
        hidden_size=128,
        layers_block_type=list(HYBRID_LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU attention supports only multiples of 32
        intermediate_size=384,
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
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        initializer_range=INITIAL_STD,
        time_step_min=1e-30,  # transformers bounds the step of the state from below, Megatron and vLLM do not
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return NemotronHForCausalLM(config).float()


def _vocabulary(tokenizer: Any) -> int:
    return -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


BUILDERS = {"qwen3": build_model, "nemotron-h": build_hybrid_model}  # by the name that MODEL of the Makefile has
