"""Dotted keys that several rules name."""

from __future__ import annotations

P, G = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
AGE = "grpo.async_grpo.max_trajectory_age_steps"
TIS = "loss_fn.truncated_importance_sampling"
MAX_LEN = "policy.max_total_sequence_length"
GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
GENERATION_PART = f"{GENERATION}.colocated.resources"
MEGATRON = "policy.megatron_cfg"
OPTIMIZER, SCHEDULER = f"{MEGATRON}.optimizer", f"{MEGATRON}.scheduler"
TP, CP, PP = (f"{MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model"))
EP, ETP = f"{MEGATRON}.expert_model_parallel_size", f"{MEGATRON}.expert_tensor_parallel_size"
DEEPEP = f"{MEGATRON}.moe_enable_deepep"
DISPATCHER = f"{MEGATRON}.moe_token_dispatcher_type"
NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
SIZES = (TP, CP, PP, NODES, GPUS, f"{GENERATION_PART}.num_nodes", f"{GENERATION_PART}.gpus_per_node")
