"""Keys of NeMo RL that this recipe leaves out, and what to do about them.

Users bring NeMo RL files. A key of such a file that nothing here reads is an error, like every unknown key; for these
the message says why the key is left out.
"""

from __future__ import annotations

_UNREAD = "NeMo RL reads it nowhere; delete it"
_DTENSOR = "this recipe trains with Megatron-core only; delete it"

HINTS = {
    "checkpointing.model_save_format": _DTENSOR,
    "checkpointing.save_consolidated": _DTENSOR,
    "cluster.segment_size": "topology is the launcher's; delete it",
    "data.default": "rows are NeMo Gym rows; delete it",
    "data.max_input_seq_length": "the limit is policy.generation.vllm_cfg.max_model_len; delete it",
    "data.num_workers": "rows are read in the driver; delete it",
    "data.use_multiple_dataloader": "a blend is one file; delete it",
    "env.math": "rows are NeMo Gym rows; delete it",
    "env.nemo_gym.port_range_high": "servers listen where they are started: make serve-env PORT=...; delete it",
    "env.nemo_gym.port_range_low": "servers listen where they are started: make serve-env PORT=...; delete it",
    "env.nemo_gym.skip_venv_if_present": "verifiers run in process; delete it",
    "env.nemo_gym.use_absolute_ip": "servers are always reached by address; delete it",
    "env.nemo_gym.uv_venv_dir": "verifiers run in process; delete it",
    "env.should_log_nemo_gym_responses": "rollouts are always written, to rollouts/*.jsonl; delete it",
    "grpo.max_rollout_turns": "turn limits belong to the agent; delete it",
    "grpo.max_val_samples": "validation takes every row of data.validation.data_path; delete it",
    "grpo.normalize_rewards": "set grpo.adv_estimator.normalize_rewards, which is what the estimator reads",
    "grpo.num_val_generations_per_prompt": "it is now grpo.val_num_generations_per_prompt",
    "grpo.penalize_invalid_tool_call": "set grpo.invalid_tool_call_advantage; null = off",
    "grpo.penalize_malformed_thinking": "set grpo.malformed_thinking_advantage; null = off",
    "grpo.invalid_tool_call_strategy": _UNREAD,
    "grpo.skip_reference_policy_logprobs_calculation": "it follows from loss_fn.reference_policy_kl_penalty; delete it",
    "grpo.use_leave_one_out_baseline": "set grpo.adv_estimator.use_leave_one_out_baseline, which the estimator reads",
    "grpo.val_batch_size": "validation is one batch; delete it",
    "logger.gpu_monitoring": "delete it",
    "logger.log_dir": "logs lie in the run directory; delete it",
    "logger.mlflow": "MLflow is not supported; delete it",
    "logger.mlflow_enabled": "MLflow is not supported; delete it",
    "logger.monitor_gpus": "delete it",
    "logger.swanlab": "SwanLab is not supported; delete it",
    "logger.swanlab_enabled": "SwanLab is not supported; delete it",
    "logger.tensorboard": "it has no settings; use logger.tensorboard_enabled",
    "logger.wandb.log_nemo_gym_full_result_tables": "rollouts are in rollouts/*.jsonl; delete it",
    "policy.draft": "draft models are not supported; delete it",
    "policy.dtensor_cfg": _DTENSOR,
    "policy.dynamic_batching": "use policy.sequence_packing; delete it",
    "policy.generation.backend": "vLLM is the only backend; delete it",
    "policy.generation.mcore_generation_config": "vLLM is the only backend; delete it",
    "policy.generation.stop_strings": "NeMo Gym rollouts end at the model's end token; delete it",
    "policy.generation.stop_token_ids": "NeMo Gym rollouts end at the model's end token; delete it",
    "policy.generation.vllm_cfg.max_num_seqs": "NeMo RL ignores it; set policy.generation.vllm_kwargs.max_num_seqs",
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": "it belongs to fp8 engines; delete it",
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": "it belongs to fp8 engines; delete it",
    "policy.generation.vllm_cfg.reasoning_parser_plugin": "vLLM has the parser built in: "
    "set http_server_serving_chat_kwargs.reasoning_parser=nemotron_v3",
    "policy.generation.vllm_cfg.skip_tokenizer_init": "the engine always has its tokenizer; delete it",
    "policy.generation.vllm_cfg.use_deep_gemm": "it belongs to fp8 engines; delete it",
    "policy.generation_batch_size": "NeMo RL reads it nowhere on this path; delete it",
    "policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy": "no FSDP; delete it",
    "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": _UNREAD,
    "policy.megatron_cfg.enabled": "Megatron-core is the only trainer; delete it",
    "policy.megatron_cfg.moe_aux_loss_coeff": "NeMo RL reads it nowhere; the model's config.json decides; delete it",
    "policy.megatron_cfg.moe_router_enable_expert_bias": "the model's config.json decides; delete it",
    "policy.optimizer": "set policy.megatron_cfg.optimizer",
    "policy.reward_model_cfg": "judges are server instances of env.nemo_gym; delete it",
    "policy.scheduler": "set policy.megatron_cfg.scheduler",
    "policy.sequence_packing.sequence_length_round": "see policy.make_sequence_length_divisible_by; delete it",
    "policy.tokenizer.use_fastokens": "delete it",
    "reward_penalties": "reward rules at the top level are not supported; delete it",
}


def upstream_hint(key: str) -> str | None:
    """Return what to do about a key of NeMo RL that this recipe leaves out, None for any other key."""
    return HINTS.get(key)
