"""The Megatron model of the policy: configuration, layer spec, log-probabilities as its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from recipes.policy.attention import CoreAttention, PackedSequences
from recipes.policy.logprobs import label_logprobs
from recipes.policy.parallel import device

if TYPE_CHECKING:
    from recipes.config.tree_policy import PolicyConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """How log-probabilities are taken from the last hidden state."""

    temperature: float  # of generation: the logits are divided by it
    chunk_size: int | None  # tokens whose logits exist at a time


class RMSNorm(torch.nn.Module):
    """RMS norm for the layer spec; Megatron's plain-torch norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LogProbModel(GPTModel):  # type: ignore[misc]
    """GPT whose last stage returns log p(label) [1, T] in float32 instead of logits or a loss."""

    def __init__(self, output: OutputConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.output = output

    def _postprocess(self, hidden_states: Tensor, labels: Tensor, **_: object) -> Tensor:
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            # Each rank's vocabulary shard gives a part of the gradient: the backward pass must sum them.
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        logprobs_T = label_logprobs(
            hidden[:, 0],
            weight_VH,
            labels[0],
            temperature=self.output.temperature,
            chunk_size=self.output.chunk_size,
            group=group,
        )
        return logprobs_T[None]


def build_model(hf: Any, config: TransformerConfig, output: OutputConfig) -> torch.nn.Module:
    """Build this rank's part of the model; its weights are undefined until loaded."""
    layers = TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config)] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )
    model: torch.nn.Module = LogProbModel(
        output,
        config=config,
        transformer_layer_spec=layers,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=rope_theta(hf),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        parallel_output=True,
    ).to(device())
    if config.bf16:
        model = Float16Module(config, model)
    return model


def transformer_config(hf: Any, cfg: PolicyConfig) -> TransformerConfig:
    """Translate a Qwen3 configuration and our parallel layout."""
    megatron = cfg.megatron_cfg
    dtype = DTYPES[cfg.precision]
    recompute = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if megatron.activation_checkpointing
        else {}
    )
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=True,  # also marks sharded weights, without which the gradient norm misses shards
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        sequence_parallel=megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1,
        calculate_per_token_loss=True,  # Megatron then leaves the gradients unscaled
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable lengths ask for it, dense models too
        # Fused kernels need CUDA extensions that the CPU lock does not have.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )


def rope_theta(hf: Any) -> int:
    """Return the rotary base; transformers 5 keeps it among the rope parameters."""
    parameters = getattr(hf, "rope_parameters", None)
    return int(parameters["rope_theta"] if parameters else hf.rope_theta)


def forward(model: torch.nn.Module, tokens_1T: Tensor, labels_1T: Tensor, sequences: PackedSequences) -> Tensor:
    """Return log p(label) [1, T] on the last pipeline stage, the hidden state elsewhere."""
    result: Tensor = model(
        input_ids=tokens_1T,
        position_ids=None,  # the rotary embedding takes positions from `sequences`
        attention_mask=None,
        labels=labels_1T,
        packed_seq_params=sequences,
    )
    return result


def _keep(weight: Tensor) -> Tensor:
    """Initialize nothing: the checkpoint overwrites every weight."""
    return weight


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
