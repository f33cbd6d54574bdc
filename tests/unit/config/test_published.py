"""The values of the published recipe: stage 1 at production and small scale, resolved and derived."""

from pathlib import Path

import pytest
import yaml

from recipes.config.keys.derive import Derived, derive
from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import load_config, refusals, require_valid
from recipes.config.merge import read_yaml

STAGE1 = CONFIG_DIR / "stage1_rlvr.yaml"
SMALL = CONFIG_DIR / "small_scale" / "stage1_rlvr_convergence_27node_h100.yaml"
TINY = CONFIG_DIR / "tiny" / "stage1_rlvr.yaml"

# Written down from NeMo RL's stage1_rlvr.yaml, independently of ours.
PUBLISHED = """
grpo:
  num_prompts_per_step: 256
  num_generations_per_prompt: 16
  val_num_generations_per_prompt: 2
  val_period: -1
  val_at_start: false
  val_at_end: false
  max_num_epochs: 1
  max_num_steps: 1000000
  advantage_clip_low: -50
  advantage_clip_high: 50
  overlong_filtering: false
  seq_logprob_error_threshold: 2
  invalid_tool_call_advantage: -5
  malformed_thinking_advantage: -5
  seed: 42
  use_dynamic_sampling: false
  adv_estimator: {name: grpo, normalize_rewards: true, use_leave_one_out_baseline: true}
  async_grpo:
    enabled: true
    max_trajectory_age_steps: 1
    max_generation_failures: 3
    in_flight_weight_updates: true
    recompute_kv_cache_after_weight_updates: false
loss_fn:
  reference_policy_kl_penalty: 0
  reference_policy_kl_type: k3
  kl_input_clamp_value: null
  kl_output_clamp_value: null
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28
  ratio_clip_c: null
  use_on_policy_kl_approximation: true
  use_importance_sampling_correction: true
  truncated_importance_sampling_ratio: 5
  truncated_importance_sampling_ratio_min: null
  truncated_importance_sampling_type: tis
  sequence_level_importance_ratios: false
  token_level_loss: true
  force_on_policy_ratio: true
  use_kl_in_reward: false
policy:
  train_global_batch_size: 4096
  train_micro_batch_size: 1
  logprob_batch_size: 1
  max_total_sequence_length: 65536
  precision: bfloat16
  logprob_chunk_size: 2048
  make_sequence_length_divisible_by: 64
  max_grad_norm: 1.0
  sequence_packing: {enabled: true, train_mb_tokens: 65536, logprob_mb_tokens: 65536}
  megatron_cfg:
    tensor_model_parallel_size: 4
    context_parallel_size: 8
    expert_model_parallel_size: 16
    expert_tensor_parallel_size: 1
    pipeline_model_parallel_size: 1
    sequence_parallel: true
    activation_checkpointing: true
    freeze_moe_router: true
    moe_router_dtype: fp32
    moe_router_bias_update_rate: 0.001
    defer_fp32_logits: true
    mtp_num_layers: 5
    mtp_loss_scaling_factor: 0.3
    mtp_use_repeated_layer: true
    mtp_detach_heads: true
    optimizer:
      optimizer: adam
      lr: 0.000003
      min_lr: 0.000003
      weight_decay: 0
      adam_beta1: 0.9
      adam_beta2: 0.999
      adam_eps: 0.00000001
      clip_grad: 1.0
      bf16: true
      use_distributed_optimizer: true
      use_precision_aware_optimizer: true
    scheduler:
      lr_decay_style: constant
      lr_decay_iters: null
      lr_warmup_iters: 10
      lr_warmup_init: 0.0000003
    distributed_data_parallel_config:
      {grad_reduce_in_fp32: false, overlap_grad_reduce: false, overlap_param_gather: true}
    env_vars: null
  generation:
    max_new_tokens: 65536
    temperature: 1.0
    top_p: 1.0
    top_k: null
    port_range_low: 3000
    port_range_high: 4999
    vllm_cfg:
      tensor_parallel_size: 8
      gpu_memory_utilization: 0.8
      max_model_len: 65536
      enforce_eager: false
      expose_http_server: false
    vllm_kwargs:
      mamba_ssm_cache_dtype: float32
      mamba_cache_mode: align
      compilation_config: {cudagraph_mode: PIECEWISE, cudagraph_capture_sizes: [1, 2, 4, 8, 16, 32, 64]}
    colocated: {enabled: false, resources: {gpus_per_node: 8, num_nodes: 144}}
env:
  should_mask_flagged_samples: true
  nemo_gym: {num_gpu_nodes: 7}
checkpointing: {save_period: 10, higher_is_better: true, checkpoint_must_save_by: null, save_optimizer: true}
cluster: {gpus_per_node: 8, num_nodes: 176}
"""
SMALL_DIFFERENCES = {
    "cluster.num_nodes": 20,
    "policy.generation.colocated.resources.num_nodes": 12,
    "policy.generation.vllm_cfg.gpu_memory_utilization": 0.7,
    "policy.megatron_cfg.env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def compare(tree: object, published: object, path: str = "") -> list[str]:
    if isinstance(published, dict):
        return [
            difference
            for name, value in published.items()
            for difference in compare(tree[name], value, f"{path}.{name}")  # type: ignore[index]
        ]
    return [] if tree == published else [f"{path}: {tree} instead of {published}"]


def test_stage1_has_the_published_values() -> None:
    assert compare(load_config(STAGE1).tree, yaml.safe_load(PUBLISHED)) == []


def test_small_scale_differs_exactly_where_published() -> None:
    small, stage1 = load_config(SMALL).tree, load_config(STAGE1).tree
    for key, value in SMALL_DIFFERENCES.items():
        assert lookup(small, key) == value
    published = yaml.safe_load(PUBLISHED)
    different = [line.split(":")[0][1:] for line in compare(small, published)]
    assert sorted(different) == sorted(SMALL_DIFFERENCES)
    assert lookup(stage1, "policy.megatron_cfg.env_vars") is None


@pytest.mark.parametrize(
    ("path", "sizes"),
    [
        (STAGE1, {"num_nodes": 183, "num_train_nodes": 32, "num_generation_nodes": 144, "num_judge_nodes": 7,
                  "total_gpus": 1464, "data_parallel_size": 8, "num_engines": 144, "samples_per_step": 4096,
                  "samples_per_rank": 512, "max_requests_in_flight": 8192}),
        (SMALL, {"num_nodes": 27, "num_train_nodes": 8, "num_generation_nodes": 12, "num_judge_nodes": 7,
                 "total_gpus": 216, "data_parallel_size": 2, "num_engines": 12, "samples_per_step": 4096}),
        (TINY, {"num_nodes": 1, "num_train_nodes": 1, "num_generation_nodes": 1, "num_judge_nodes": 0,
                "train_workers_per_node": 1, "train_gpus": 1, "data_parallel_size": 1, "num_engines": 1,
                "gpus_per_engine": 1}),
    ],
    ids=["prod", "small", "tiny"],
)  # fmt: skip
def test_sizes(path: object, sizes: dict[str, int]) -> None:
    derived: Derived = derive(require_valid(load_config(str(path))))
    assert {name: getattr(derived, name) for name in sizes} == sizes


def test_tiny_is_small_scale_in_what_decides_the_algorithm() -> None:
    small, tiny = load_config(SMALL).tree, load_config(TINY).tree
    for key in ("loss_fn", "grpo.async_grpo", "grpo.adv_estimator", "grpo.advantage_clip_high",
                "grpo.seq_logprob_error_threshold", "grpo.invalid_tool_call_advantage", "grpo.overlong_filtering",
                "policy.generation.temperature", "policy.max_grad_norm"):  # fmt: skip
        assert lookup(tiny, key) == lookup(small, key), key


# Values on which published sources disagree, and where a comment says which was taken and why: at the key, above it, or
# (key None) anywhere in the file. From specs of the two repositories and the reports.
DISPUTED = [
    ("grpo_base.yaml", "grpo.overlong_filtering", "Nano report"),
    ("grpo_base.yaml", "grpo.invalid_tool_call_advantage", "invalid_tool_call_strategy"),
    ("grpo_base.yaml", "loss_fn.truncated_importance_sampling_type", "report masks"),
    ("grpo_base.yaml", "policy.make_sequence_length_divisible_by", "B200"),
    ("grpo_base.yaml", "policy.megatron_cfg.mtp_num_layers", "B200"),
    ("grpo_base.yaml", "policy.generation.port_range_low", "B200"),
    ("grpo_base.yaml", "policy.generation.vllm_cfg.tensor_parallel_size", "B200"),
    ("grpo_base.yaml", "policy.generation.vllm_cfg.enable_prefix_caching", "published SWE files"),
    ("grpo_base.yaml", "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.reasoning_parser", "nano_v3"),
    ("grpo_base.yaml", "policy.generation.vllm_kwargs.mamba_cache_mode", "B200"),
    ("grpo_base.yaml", "checkpointing.checkpoint_must_save_by", "B200"),
    ("stage1_rlvr.yaml", "env.nemo_gym.num_gpu_nodes", "B200"),
    ("stage1_rlvr.yaml", "env.nemo_gym.config_paths", "terminal_pivot"),
    ("stage1_rlvr.yaml", "policy.max_total_sequence_length", "report"),
    ("stage1_rlvr.yaml", "policy.megatron_cfg.expert_model_parallel_size", "B200"),
    ("stage1_rlvr.yaml", "policy.generation.colocated.resources.num_nodes", "B200"),
    ("stage1_rlvr.yaml", None, "Effort shaping is off"),
    ("stage1_rlvr.yaml", None, "keep 1000000 checkpoints"),
    ("stage2_swe1.yaml", "grpo.overlong_filtering", "published"),
    ("stage2_swe1.yaml", "policy.megatron_cfg.context_parallel_size", "B200"),
    ("stage2_swe1.yaml", "checkpointing.metric_name", "val:total_reward/mean"),
    ("stage2_swe2.yaml", "policy.megatron_cfg.context_parallel_size", "B200"),
    ("stage2_swe2.yaml", "policy.megatron_cfg.expert_model_parallel_size", "B200"),
    ("stage2_swe2.yaml", "policy.generation.vllm_cfg.gpu_memory_utilization", "B200"),
    ("grpo_base.yaml", "policy.generation.vllm_kwargs.max_num_batched_tokens", "the other files set nothing"),
    ("stage3_rlhf.yaml", "env.nemo_gym.num_gpu_nodes", "B200"),
    ("stage3_rlhf.yaml", "policy.megatron_cfg.expert_model_parallel_size", "B200"),
    ("stage3_rlhf.yaml", "policy.generation.colocated.resources.num_nodes", "B200"),
    ("stage3_rlhf.yaml", None, "keeps 1000000 checkpoints"),
    ("b200/stage1_rlvr.yaml", None, "alone train on terminal use (terminal_pivot)"),
    ("b200/stage3_rlhf.yaml", None, "cluster.num_nodes, which is 72 there"),
    ("small_scale/stage1_rlvr_convergence_27node_h100.yaml", None, "max_num_seqs to 16 where nothing reads it"),
    ("small_scale/stage1_rlvr_convergence_27node_h100.yaml", None, "21 nodes"),
    ("small_scale/stage2_swe1_convergence_20node_h100.yaml", None, "8 nodes"),
    ("small_scale/stage3_rlhf_convergence_28node_h100.yaml", None, "24 nodes"),
    ("environments/genrm_compare.yaml", None, "B200 files leave out num_rollouts_per_prompt"),
    ("environments/equivalence_llm_judge.yaml", None, "nl2bash-equivalency.yaml"),
    ("environments/swe_agents.yaml", None, "run_with_mixed_prompts"),
    ("environments/code_gen.yaml", "code_gen.resources_servers.code_gen.num_processes", "NeMo Gym"),
    ("environments/math_with_judge.yaml", "math_with_judge.resources_servers.math_with_judge.should_use_judge", "Gym"),
    ("grpo_base.yaml", "policy.generation.vllm_cfg.expose_http_server", "published files switch it on for NeMo Gym"),
    ("nano_grpo.yaml", "loss_fn.truncated_importance_sampling_type", "report masks"),
    ("nano_grpo.yaml", None, "NVIDIA published two files"),
]


@pytest.mark.parametrize(("name", "key", "words"), DISPUTED, ids=lambda value: str(value))
def test_disputed_value_says_which_source_was_taken(name: str, key: str | None, words: str) -> None:
    path = CONFIG_DIR / name
    lines = path.read_text(encoding="utf-8").splitlines()
    if key is None:
        comments = [line.partition("#")[2] for line in lines]
    else:
        number = read_yaml(path, name=name).lines[key] - 1
        first = number
        while lines[first - 1].strip().startswith("#"):
            first -= 1
        comments = [line.partition("#")[2] for line in lines[first : number + 1]]
    assert words in " ".join(comment.strip() for comment in comments)


@pytest.mark.parametrize(
    "file", sorted(CONFIG_DIR.glob("**/stage?_*.yaml")), ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_the_native_engine_trains_with_every_published_value(file: Path) -> None:
    """No key of policy.megatron_cfg is refused in any stage file."""
    found = {problem.where.rpartition(": ")[2] for problem in refusals(load_config(file))}
    assert not {key for key in found if key.startswith("policy.megatron_cfg.")}
