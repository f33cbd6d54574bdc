"""The model: block `policy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from recipes.config.tree.generation import GenerationConfig
from recipes.config.tree.marks import Honours, Text, Unit
from recipes.config.tree.training import MegatronConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer and chat template."""

    name: Text
    """directory or hub name of the tokenizer"""
    chat_template: Text | None
    """file with the chat template; null = the tokenizer's own"""
    chat_template_kwargs: Mapping[str, Any] | None
    """arguments of the chat template, e.g. enable_thinking; null = none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePackingConfig:
    """Several rollouts in one row of a micro-batch."""

    enabled: bool
    """pack rollouts; false = one padded rollout per row"""
    algorithm: Literal["modified_first_fit_decreasing"]
    """bin-packing algorithm"""
    train_mb_tokens: Annotated[int, Ge(1), Unit("tokens")]
    """tokens in one training micro-batch"""
    logprob_mb_tokens: Annotated[int, Ge(1), Unit("tokens")]
    """tokens in one log-probability micro-batch; see logprob_batch_size"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The model, how it is trained and how it generates."""

    model_name: Text
    """Hugging Face directory of the start weights; the launcher sets it from MODEL_PATH"""
    tokenizer: TokenizerConfig
    hf_config_overrides: Annotated[
        Mapping[str, Any], Honours({}, reason="the trainer alone would follow them, not the engines and the export")
    ]
    """values that replace those of the model's config.json"""
    precision: Annotated[
        Literal["bfloat16", "float16", "float32"],
        Honours("bfloat16", "float32", reason="the native policy trains in bfloat16 or float32"),
    ]
    """dtype of weights and activations"""
    max_total_sequence_length: Annotated[int, Ge(1), Unit("tokens")]
    """longest rollout trained on, prompt and all turns, in tokens"""
    train_global_batch_size: Annotated[int, Ge(1), Unit("rollouts")]
    """rollouts per optimizer step: P*G, or a divisor of it for several steps on one batch (the clip is then live)"""
    train_micro_batch_size: Annotated[int, Ge(1), Unit("rollouts")]
    """full-length rollouts in one training micro-batch; sets the packing budget"""
    logprob_batch_size: Annotated[int, Ge(1), Unit("rollouts")]
    """full-length rollouts in one log-probability micro-batch; in the native engine, of the parity gate only"""
    logprob_chunk_size: Annotated[int | None, Ge(1), Unit("tokens")]
    """tokens whose float32 logits exist at once; null = all"""
    offload_optimizer_for_logprob: bool
    """move optimizer state to CPU memory during passes for log-probabilities alone, and back after each"""
    max_grad_norm: Annotated[float, Gt(0), Unit("L2 norm")]
    """global L2 norm to which gradients are clipped"""
    max_skipped_steps: Annotated[int, Ge(0), Unit("steps")]
    """steps in a row that may leave the weights as they are because loss or gradients are not finite; one more ends"""
    make_sequence_length_divisible_by: Annotated[int, Ge(1), Unit("tokens")]
    """pad each rollout to a multiple of this many tokens: 2*CP*TP"""
    sequence_packing: SequencePackingConfig
    megatron_cfg: MegatronConfig
    generation: GenerationConfig
