"""How the policy generates: block `policy.generation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from recipes.config.tree.marks import Honours, Text, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResourcesConfig:
    """The part of the cluster that generates; the rest trains."""

    num_nodes: Annotated[int, Ge(1), Unit("nodes")]
    """nodes that generate; in a one-node cluster 1"""
    gpus_per_node: Annotated[int, Ge(1), Unit("GPUs")]
    """GPUs per node that generate; all of them unless the cluster has one node"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedConfig:
    """Where engines run."""

    enabled: Literal[False]
    """engines share GPUs with training; asynchronous training needs them apart"""
    resources: GenerationResourcesConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChatConfig:
    """How the engines' HTTP servers answer chat completions."""

    enable_auto_tools: bool
    """parse tool calls when the request leaves the choice to the model"""
    tool_parser: Text | None
    """vLLM tool-call parser; null = none"""
    reasoning_parser: Text | None
    """vLLM reasoning parser; null = none"""
    default_chat_template_kwargs: Mapping[str, Any] | None
    """chat template arguments where a request has none; null = none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """One vLLM engine."""

    async_engine: Literal[True]
    """asynchronous engine; the only kind there is"""
    precision: Literal["bfloat16", "float16", "float32"]
    """dtype of the engine's weights"""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    """dtype of the KV cache; auto = precision"""
    tensor_parallel_size: Annotated[int, Ge(1), Unit("GPUs")]
    """GPUs that share each layer of one engine"""
    pipeline_parallel_size: Annotated[
        int, Ge(1), Unit("GPUs"), Honours(1, reason="engines with pipeline parallelism are not built yet")
    ]
    """GPUs that hold successive layers of one engine"""
    expert_parallel_size: Annotated[int, Ge(1), Unit("GPUs")]
    """GPUs that share whole experts: 1 (each expert is split) or tensor_parallel_size"""
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1), Unit("share")]
    """share of GPU memory an engine takes"""
    max_model_len: Annotated[int, Ge(1), Unit("tokens")]
    """longest context of an engine, in tokens"""
    enforce_eager: bool
    """no CUDA graphs"""
    enable_prefix_caching: bool
    """reuse the KV cache of equal prefixes; reset at every weight push"""
    enable_return_routed_experts: bool
    """report to which experts each token went, for policy.router_replay; only of models with experts"""
    enable_vllm_metrics_logger: bool
    """sample each engine's queue and cache over time"""
    vllm_metrics_logger_interval: Annotated[float, Gt(0), Unit("seconds")]
    """seconds between two samples of an engine's queue and cache"""
    expose_http_server: bool
    """OpenAI-compatible server on every engine, for agents that speak HTTP"""
    http_server_serving_chat_kwargs: ServingChatConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Sampling and the vLLM engines."""

    max_new_tokens: Annotated[int, Ge(1), Unit("tokens")]
    """tokens sampled for one request at most; a row may ask for fewer"""
    temperature: Annotated[float, Gt(0), Unit("temperature")]
    """sampling temperature of training rollouts"""
    top_p: Annotated[
        float,
        Gt(0),
        Le(1),
        Unit("probability"),
        Honours(1, reason="the trainer does not filter as the engine would: every importance weight would be biased"),
    ]
    """nucleus sampling of training rollouts; 1 = off"""
    top_k: Annotated[int | None, Ge(1), Unit("tokens")]
    """top-k sampling of training rollouts; null = off"""
    val_temperature: Annotated[float, Ge(0), Unit("temperature")]
    """sampling temperature of validation; 0 = greedy"""
    val_top_p: Annotated[float, Gt(0), Le(1), Unit("probability")]
    """nucleus sampling of validation"""
    val_top_k: Annotated[int | None, Ge(1), Unit("tokens")]
    """top-k sampling of validation; null = off"""
    port_range_low: Annotated[int, Ge(1024), Le(8999), Unit("TCP port")]
    """first TCP port on which engines take requests"""
    port_range_high: Annotated[int, Ge(1024), Le(8999), Unit("TCP port")]
    """end of the range of ports, exclusive"""
    verify_weight_pushes: bool
    """compare a checksum of every tensor of a weight push on both sides; it takes seconds per push"""
    max_starts: Annotated[int, Ge(1), Unit("starts")]
    """starts in a row that may fail of an engine, a judge's copy or a rollout worker; then it stays away"""
    min_share_up: Annotated[float, Gt(0), Le(1), Unit("share")]
    """share of engines, of each judge's copies and rollout workers that must be up for a run to begin; others join"""
    colocated: ColocatedConfig
    vllm_cfg: VllmConfig
    vllm_kwargs: Mapping[str, Any]
    """further vLLM engine arguments, passed as they are"""
