"""The Megatron model of the policy: a family's model under our parallel layout and precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from recipes.policy.families.family import Family
from recipes.policy.layers.context import ContextSequences, gather_row
from recipes.policy.layers.head import OutputConfig
from recipes.policy.layers.packed import PackedSequences
from recipes.policy.layers.router import (
    count_tokens,
    freeze_routers,
    pads_of_rank,
    replay_routes,
    row_marks,
    use_uneven_gather,
)
from recipes.policy.layers.token_heads import TokenHeads
from recipes.policy.lora import add_adapters
from recipes.policy.parallel import device

if TYPE_CHECKING:
    from recipes.config.tree import MegatronConfig, PolicyConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(family: Family, hf: Any, config: TransformerConfig, cfg: PolicyConfig) -> torch.nn.Module:
    """Build this rank's part of the model; its weights are undefined until loaded."""
    output = OutputConfig(temperature=cfg.generation.temperature, chunk_size=cfg.logprob_chunk_size)
    use_uneven_gather()
    model = family.build(hf, config, output).to(device())
    count_tokens(model)
    if cfg.router_replay.enabled:
        replay_routes(model)
    if cfg.megatron_cfg.freeze_moe_router:
        freeze_routers(model)
    if cfg.megatron_cfg.freeze_trunk:
        model.requires_grad_(False)
    if cfg.megatron_cfg.peft.enabled:
        add_adapters(model, family.weights(model), cfg.megatron_cfg.peft)
    if not config.bf16:
        return model
    rounded: torch.nn.Module = Float16Module(config, model)
    _restore_router_buffers(rounded)
    return rounded


def build_heads(family: Family, hf: Any, config: TransformerConfig) -> TokenHeads | None:
    """Build the multi-token heads of the model, after it; None where it has none or where another stage holds them."""
    heads = family.build_heads(hf, config) if parallel_state.is_pipeline_last_stage() else None
    if heads is None:
        return None
    placed: TokenHeads = heads.to(device(), DTYPES["bfloat16"] if config.bf16 else None)
    count_tokens(placed)  # only now: Megatron makes a router's weight on the CPU, and the counts lie where it does
    _restore_router_buffers(placed)
    placed.requires_grad_(False)
    return placed


def _restore_router_buffers(model: torch.nn.Module) -> None:
    """Undo the rounding of the routers' biases and of their counts of tokens, which stay in float32.

    A count in 16 bits does not grow beyond 256 times what a microbatch adds.
    """
    for module in model.modules():
        if restore := getattr(module, "_maintain_float32_expert_bias", None):
            restore()
        if (counts := getattr(module, "local_tokens_per_expert", None)) is not None:
            module.local_tokens_per_expert = counts.float()


def transformer_config(family: Family, hf: Any, cfg: PolicyConfig) -> TransformerConfig:
    """Join what the model says with our parallel layout, precision and recomputation."""
    megatron = cfg.megatron_cfg
    dtype = DTYPES[cfg.precision]
    recompute = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if megatron.activation_checkpointing
        else {}
    )
    sizes = family.config(hf)
    experts = _expert_config(sizes, megatron)
    is_local = megatron.attention_backend == "local"
    config = TransformerConfig(
        **sizes,
        **experts,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        deterministic_mode=cfg.determinism == "full",
        perform_initialization=True,  # also marks sharded weights, without which the gradient norm misses shards
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        sequence_parallel=megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1,
        calculate_per_token_loss=True,  # gradients are divided once, by what the loss counted over all ranks
        variable_seq_lengths=experts["moe_token_dispatcher_type"] != "allgather",  # it asks for equal lengths,
        transformer_impl="local" if is_local else "transformer_engine",  # of attention alone; see `core_attention`
        attention_backend=AttnBackend["auto" if is_local else megatron.attention_backend],
        apply_rope_fusion=megatron.apply_rope_fusion,
        gradient_accumulation_fusion=megatron.gradient_accumulation_fusion,
        # Fused kernels need CUDA extensions that the CPU lock does not have.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )
    config.variable_seq_lengths = True  # which `UnevenAllGather` does without
    return config


def _expert_config(sizes: Mapping[str, Any], megatron: MegatronConfig) -> dict[str, Any]:
    """Return what the configuration says of experts, if the model has any."""
    if not sizes.get("num_moe_experts"):
        return {"moe_token_dispatcher_type": "alltoall"}  # Megatron's default asks for equal lengths
    has_bias = sizes.get("moe_router_enable_expert_bias", False)
    return {
        "moe_router_dtype": megatron.moe_router_dtype,
        "moe_router_load_balancing_type": megatron.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": megatron.moe_router_bias_update_rate if has_bias else 0.0,
        "moe_permute_fusion": megatron.moe_permute_fusion,
        "moe_token_dispatcher_type": megatron.moe_token_dispatcher_type,
        "moe_enable_deepep": megatron.moe_enable_deepep,
        "moe_grouped_gemm": megatron.moe_grouped_gemm,
        "use_fused_weighted_squared_relu": megatron.use_fused_weighted_squared_relu,
        # Else it is for its first call that a layer of Transformer Engine overwrites the gradients of fused sums, and
        # the multi-token heads call one several times.
        "disable_parameter_transpose_cache": True,
        "moe_shared_expert_overlap": megatron.moe_shared_expert_overlap,
    }


def forward(model: torch.nn.Module, tokens_1T: Tensor, labels_1T: Tensor, sequences: PackedSequences) -> Tensor:
    """Return log p(label) [1, T] on the last pipeline stage, the hidden state elsewhere.

    With context parallelism each rank computes its share of the tokens and gets the log-probabilities of all.
    """
    marks_1T = row_marks(sequences.pads_1T, sequences.routes_TLK)
    if isinstance(sequences, ContextSequences):
        tokens_1T, labels_1T, marks_1T = (row_1T[:, sequences.own_O] for row_1T in (tokens_1T, labels_1T, marks_1T))
    config = get_model_config(model)
    result: Tensor = model(
        input_ids=tokens_1T,
        position_ids=None,  # the rotary embedding takes positions from `sequences`
        attention_mask=None,
        labels=labels_1T,
        packed_seq_params=sequences,
        padding_mask=pads_of_rank(marks_1T, is_divided=config.sequence_parallel) if config.num_moe_experts else None,
    )
    if isinstance(sequences, ContextSequences) and parallel_state.is_pipeline_last_stage():
        return gather_row(result, sequences, parallel_state.get_context_parallel_group())
    return result


def _keep(weight: Tensor) -> Tensor:
    """Initialize nothing: the checkpoint overwrites every weight."""
    return weight
