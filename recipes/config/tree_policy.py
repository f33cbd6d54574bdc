"""The `policy` block of the configuration tree: the model, Megatron-core and vLLM. See config_tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer and chat template."""

    name: str
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePackingConfig:
    """Several rollouts in one row of a micro-batch."""

    enabled: bool
    algorithm: str
    train_mb_tokens: int
    logprob_mb_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Megatron's optimizer."""

    optimizer: str
    lr: float
    min_lr: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    sgd_momentum: float
    clip_grad: float
    bf16: bool
    fp16: bool
    params_dtype: str
    use_distributed_optimizer: bool
    use_precision_aware_optimizer: bool
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    overlap_cpu_optimizer_d2h_h2d: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay over training steps."""

    lr_warmup_iters: int
    lr_warmup_init: float
    lr_decay_style: str
    lr_decay_iters: int | None
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpConfig:
    """Gradient reduction over data-parallel ranks."""

    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Training in 8-bit floating point."""

    enabled: bool
    fp8: str
    fp8_recipe: str
    fp8_param: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Megatron-core: parallelism, memory, mixture of experts, optimizer."""

    tensor_model_parallel_size: int
    sequence_parallel: bool
    context_parallel_size: int
    pipeline_model_parallel_size: int
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    pipeline_dtype: str
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    activation_checkpointing: bool
    empty_unused_memory_level: int
    defer_fp32_logits: bool
    apply_rope_fusion: bool
    bias_activation_fusion: bool
    gradient_accumulation_fusion: bool
    use_fused_weighted_squared_relu: bool
    freeze_moe_router: bool
    moe_router_dtype: str
    moe_router_load_balancing_type: str
    moe_router_bias_update_rate: float
    moe_permute_fusion: bool
    moe_enable_deepep: bool
    moe_token_dispatcher_type: str
    moe_shared_expert_overlap: bool
    moe_per_layer_logging: bool
    mtp_num_layers: int
    mtp_loss_scaling_factor: float
    mtp_use_repeated_layer: bool
    mtp_detach_heads: bool
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    distributed_data_parallel_config: DdpConfig
    fp8_cfg: Fp8Config
    env_vars: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResourcesConfig:
    """The part of the cluster that generates; the rest trains."""

    num_nodes: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedConfig:
    """Where engines run."""

    enabled: bool
    resources: GenerationResourcesConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChatConfig:
    """Chat completions of that server."""

    enable_auto_tools: bool
    tool_parser: str | None
    reasoning_parser: str | None
    default_chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """One vLLM engine."""

    async_engine: bool
    precision: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int
    enforce_eager: bool
    enable_prefix_caching: bool
    enable_vllm_metrics_logger: bool
    vllm_metrics_logger_interval: float
    expose_http_server: bool
    http_server_serving_chat_kwargs: ServingChatConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Sampling and the vLLM engines."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    val_temperature: float
    val_top_p: float
    val_top_k: int | None
    port_range_low: int
    port_range_high: int
    colocated: ColocatedConfig
    vllm_cfg: VllmConfig
    vllm_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The model, how it is trained and how it generates."""

    model_name: str
    tokenizer: TokenizerConfig
    hf_config_overrides: Mapping[str, Any]
    precision: str
    max_total_sequence_length: int
    train_global_batch_size: int
    train_micro_batch_size: int
    logprob_batch_size: int
    logprob_chunk_size: int | None
    offload_optimizer_for_logprob: bool
    max_grad_norm: float
    make_sequence_length_divisible_by: int
    sequence_packing: SequencePackingConfig
    megatron_cfg: MegatronConfig
    generation: GenerationConfig
