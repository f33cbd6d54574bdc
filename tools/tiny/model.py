"""Tiny models of about a million parameters with seeded random weights: Nemotron-H, Qwen3, with experts or without.

The tiny tokenizer: all bytes, and one piece for each frequent word of the tiny tasks.

It is a unigram model in which every piece costs the same, so a text becomes as few pieces as possible, and every text
can be encoded. No piece spans a turn boundary: the ids of a conversation are a prefix of the ids of the same
conversation with more turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

END_OF_TURN = "<|im_end|>"  # eos
PADDING = "<|endoftext|>"
MAX_TOKENS = 512  # of a conversation: the number of positions of the model
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
# Added tokens that are not special: they stay in the decoded text, where the parsers look for them.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

NAMES = ("Tom", "Ann", "Bob", "Eva", "Max", "Lea", "Ben", "Ida")
CITIES = ("Rome", "Oslo", "Bonn", "Lima", "Kiel", "Nice", "Graz", "Bari")
WORDS = (
    *("system\n", "user\n", "assistant\n", "tool\n", "\\boxed{", "<answer>", "</answer>", "):", ": ", "?\n"),
    *("Compute", "Spell", "Which", "Write", "What", "JSON", "name", "age", "city", "member", "sun", "nus"),
    *(" is", " in", " the", " to", " of", " by", " as", " this", " with", " word", " backward", " (example", " ->"),
    *(" Answer", " answer", " largest", " digit", " number", " letter", " step", " problem"),
    *(" JSON", " name", " age", " city", " member", " true", " false", "true", "false"),
    *(*NAMES, *CITIES),
    *(f" {word}" for word in (*NAMES, *CITIES)),
    *(f" {letter}: " for letter in "ABCDEFGHI"),
    *('{"', '":"', '","', '":', ',"', '"}'),
    *("# Tools", "<function=", "</function>", "<parameter=", "</parameter>", "function", "description", "parameters"),
)


def build_tokenizer(more_words: Sequence[str] = ()) -> Any:
    """Return the tokenizer with its chat template, as a transformers fast tokenizer; `more_words` are pieces, too."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(piece for piece, _ in bytes_to_letters.pre_tokenize_str(word)) for word in (*WORDS, *more_words)]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + words
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces]))
    tokenizer.pre_tokenizer = bytes_to_letters
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return fast


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


def build_model(tokenizer: Any, *, seed: int, family: str = "qwen3") -> Any:
    """Return an untrained dense model in float32 for `tokenizer`; `family` is its `model_type`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SHARED, **_of(tokenizer), num_hidden_layers=4, rope_theta=10000.0)
    return _seeded(AutoModelForCausalLM.from_config, config, seed)


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
