"""The tiny model: a dense Qwen3 decoder of about a million parameters with seeded random weights."""

from __future__ import annotations

from typing import Any

from tools.tiny.tokenizer import MAX_TOKENS

VOCABULARY_MULTIPLE = 64  # so that the vocabulary splits over tensor-parallel ranks
INITIAL_STD = 0.05  # of the initial weights


def build_model(tokenizer: Any, *, seed: int) -> Any:
    """Return an untrained float32 model for `tokenizer`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
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
