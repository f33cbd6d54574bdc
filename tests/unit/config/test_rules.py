"""Each cross-field rule: the contradiction, and the exact line that names it with the formula and its values."""

from pathlib import Path

import pytest

from recipes.config.keys.schema import CONFIG_DIR, lookup
from recipes.config.load import load_config
from recipes.config.rules.all import RULES
from recipes.config.rules.optimizer import UNREAD

STAGE1 = CONFIG_DIR / "stage1_rlvr.yaml"
SMALL = CONFIG_DIR / "small_scale" / "stage1_rlvr_convergence_27node_h100.yaml"
TINY = CONFIG_DIR / "tiny" / "stage1_rlvr.yaml"
ON_POLICY = "loss_fn.force_on_policy_ratio"
TIS = "loss_fn.truncated_importance_sampling"
MEGATRON = "policy.megatron_cfg"
VLLM = "policy.generation.vllm_cfg"
RESOURCES = "policy.generation.colocated.resources"
GENRM = "env.nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare"
GENRM_MODEL = "env.nemo_gym.genrm_model.responses_api_models.genrm_model.vllm_serve_kwargs"
DISTILS = ["grpo.adv_estimator.name=on_policy_distillation", "loss_fn.reference_policy_kl_penalty=0"]
FLEX = [f"{MEGATRON}.moe_enable_deepep=true", f"{MEGATRON}.moe_token_dispatcher_type=flex"]

# rule, file, overrides, the one line they must give (after "command line: ")
SGD = [
    f"{MEGATRON}.optimizer.optimizer=sgd",
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather=false",
]
AGE, AT_ONCE = "grpo.async_grpo.max_trajectory_age_steps", "policy.generation.vllm_kwargs.max_num_seqs"
OR_NONE = "two runs would differ; write this, or policy.determinism=none"


def full(**changed: str) -> list[str]:
    """Return what DETERMINISM=full sets, with one of its values changed."""
    values = {"determinism": "policy.determinism=full", "age": f"{AGE}=0", "at_once": f"{AT_ONCE}=1"}
    return list((values | {"cache": f"{VLLM}.enable_prefix_caching=false"} | changed).values())


CASES = [
    ("batch_is_prompts_times_generations", STAGE1, ["policy.train_global_batch_size=2048"],
     "policy.train_global_batch_size: got 2048, expected grpo.num_prompts_per_step * grpo.num_generations_per_prompt = "
     "256 * 16 = 4096; force_on_policy_ratio needs exactly one optimizer step per batch; delete this key"),
    ("batch_is_prompts_times_generations", STAGE1, ["policy.train_global_batch_size=3000", f"{ON_POLICY}=false"],
     "policy.train_global_batch_size: got 3000, expected a divisor of grpo.num_prompts_per_step * "
     "grpo.num_generations_per_prompt = 256 * 16 = 4096; delete this key"),
    ("group_has_a_baseline", TINY, ["grpo.num_generations_per_prompt=1"],
     "grpo.num_generations_per_prompt: got 1, expected 2 or more; the leave-one-out baseline of a group of 1 leaves "
     "no advantage; set it to 2 or more"),
    ("lag_needs_importance_correction", TINY,
     ["loss_fn.use_importance_sampling_correction=false", f"{TIS}_type=null", f"{TIS}_ratio=null"],
     "loss_fn.use_importance_sampling_correction: got false, expected true; "
     "grpo.async_grpo.max_trajectory_age_steps is 1, so weights lag behind; set this to true, or "
     "grpo.async_grpo.max_trajectory_age_steps to 0"),
    ("truncation_is_complete", TINY, [f"{TIS}_type=null"],
     "loss_fn.truncated_importance_sampling_type: is null although loss_fn.truncated_importance_sampling_ratio is "
     "5.0; name a type, or set loss_fn.truncated_importance_sampling_ratio to null"),
    ("truncation_is_complete", TINY,
     ["loss_fn.use_importance_sampling_correction=false", "grpo.async_grpo.max_trajectory_age_steps=0"],
     f"{TIS}_type: got tis, expected null; there is no weight to truncate without "
     "loss_fn.use_importance_sampling_correction; set this to null"),
    ("truncation_is_complete", TINY, [f"{TIS}_ratio=null"],
     f"{TIS}_ratio: got null, expected a number > 0; {TIS}_type is tis; give a bound (5 in the recipe), or set the "
     "type to null"),
    ("truncation_is_complete", TINY, [f"{TIS}_type=icepop"],
     f"{TIS}_ratio_min: got null, expected a number; icepop drops what lies below it; give a bound (0.5 is common)"),
    ("truncation_is_complete", TINY, [f"{TIS}_ratio_min=6"],
     f"{TIS}_ratio_min: got 6.0, expected at most {TIS}_ratio = 5.0; no weight could pass; lower it"),
    ("truncation_is_complete", TINY, [f"{TIS}_type=null", f"{TIS}_ratio=null", f"{TIS}_ratio_min=0.5"],
     f"{TIS}_ratio_min: got 0.5, expected null; {TIS}_ratio is null, so no weight is bounded; set both bounds and "
     f"{TIS}_type, or this to null"),
    ("truncation_is_complete", TINY,
     [f"{TIS}_type=seq-mask-tis", f"{TIS}_ratio_min=0.5", "loss_fn.sequence_level_importance_ratios=true",
      "loss_fn.token_level_loss=false"],
     "loss_fn.truncated_importance_sampling_type: got seq-mask-tis, expected tis or icepop; a ratio per rollout "
     "cannot be masked per rollout again; use tis or icepop"),
    ("ratio_is_one_kind", TINY, ["loss_fn.use_cispo=true"],
     "loss_fn.use_cispo: cannot be combined with loss_fn.force_on_policy_ratio; use_cispo replaces it; set "
     "loss_fn.force_on_policy_ratio to false"),
    ("ratio_is_one_kind", TINY, ["loss_fn.disable_ppo_ratio=true"],
     "loss_fn.disable_ppo_ratio: cannot be combined with loss_fn.force_on_policy_ratio; force_on_policy_ratio would "
     "win; set one to false"),
    ("ratio_is_one_kind", TINY, ["loss_fn.disable_ppo_ratio=true", f"{ON_POLICY}=false", "loss_fn.ratio_clip_c=3"],
     "loss_fn.disable_ppo_ratio: cannot be combined with loss_fn.ratio_clip_c; there is no ratio then; set "
     "loss_fn.ratio_clip_c to null"),
    ("ratio_is_one_kind", TINY, ["loss_fn.sequence_level_importance_ratios=true"],
     "loss_fn.token_level_loss: got true, expected false; one weight per rollout needs the mean per rollout; "
     "set this to false"),
    ("kl_in_reward_has_an_estimator", TINY,
     ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"],
     "loss_fn.use_kl_in_reward: got true, expected false; only reinforce_plus_plus has a reward per token; set it to "
     "false"),
    ("kl_in_reward_has_an_estimator", TINY,
     ["loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name=reinforce_plus_plus"],
     "loss_fn.use_kl_in_reward: got true, expected false; loss_fn.reference_policy_kl_penalty is 0, so nothing would "
     "be subtracted; set one of them"),
    ("penalties_survive_the_clip", TINY, ["grpo.invalid_tool_call_advantage=-60"],
     "grpo.invalid_tool_call_advantage: got -60.0, expected a number in [-50.0, 50.0] = "
     "grpo.advantage_clip_low..high; the clip comes last and would change it; change this value or the bounds"),
    ("scaling_has_a_range", TINY, ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=1"],
     "grpo.reward_scaling.source_min: got 1.0, expected less than grpo.reward_scaling.source_max = 1.0; "
     "the map divides by their difference; change one of them"),
    ("effort_shaping_is_on_or_off", TINY, ["env.nemo_gym.effort_levels.low_weight=0.5"],
     'env.nemo_gym.effort_levels.low_string: is "", which is off, although env.nemo_gym.effort_levels.low_weight is '
     "set; set both or neither"),
    ("sampling_is_whole_distribution", TINY, ["policy.generation.top_k=50"],
     "policy.generation.top_k: got 50, expected null; NeMo Gym requests carry temperature and top_p only; "
     "delete this key"),
    ("validation_can_run", TINY, ["data.validation.data_path=null", "grpo.val_at_end=false"],
     "grpo.val_at_start: is true although data.validation.data_path is null; give the rows or switch this "
     "validation off"),
    ("validation_can_run", STAGE1, ["checkpointing.metric_name=val:total_reward/mean"],
     "checkpointing.metric_name: got val:total_reward/mean, expected null or train:NAME; no validation would ever "
     "run; set grpo.val_period or grpo.val_at_end, or use null or a train: metric"),
    ("validation_can_run", TINY, ["grpo.stop_at_validation_metric=accuracy"],
     "grpo.stop_at_validation_threshold: is null although grpo.stop_at_validation_metric is set; set both or neither"),
    ("engine_and_trainer_agree_on_length", TINY, [f"{VLLM}.max_model_len=512"],
     f"{VLLM}.max_model_len: got 512, expected policy.max_total_sequence_length = 256; rollouts must fit both the "
     "engine and the trainer; delete this key"),
    ("engine_and_trainer_agree_on_length", TINY, ["policy.generation.max_new_tokens=512"],
     f"policy.generation.max_new_tokens: got 512, expected at most {VLLM}.max_model_len = 256; no request could be "
     "that long; lower it"),
    ("lengths_are_divisible", STAGE1, ["policy.make_sequence_length_divisible_by=32"],
     "policy.make_sequence_length_divisible_by: got 32, expected a multiple of 64 (2 * CP 8 if CP > 1, times TP 4 if "
     "sequence_parallel); delete this key: it follows from CP and TP"),
    ("lengths_are_divisible", STAGE1, ["policy.max_total_sequence_length=50000"],
     "policy.max_total_sequence_length: got 50000, expected a multiple of "
     "policy.make_sequence_length_divisible_by = 64; the longest rollout would be padded past it; lower it to "
     "49984"),
    ("packing_fits_one_rollout", TINY, ["policy.sequence_packing.train_mb_tokens=128"],
     "policy.sequence_packing.train_mb_tokens: got 128, expected policy.max_total_sequence_length = 256 or more; "
     "the longest rollout must fit one micro-batch; delete this key"),
    ("nodes_are_shared_out", SMALL, [f"{RESOURCES}.num_nodes=20"],
     f"{RESOURCES}.num_nodes: got 20, expected less than cluster.num_nodes = 20; lower it: cluster.num_nodes less the "
     "generation nodes train; judges are not part of either"),
    ("nodes_are_shared_out", SMALL, [f"{RESOURCES}.gpus_per_node=4"],
     f"{RESOURCES}.gpus_per_node: got 4, expected cluster.gpus_per_node = 8; delete this key: only a "
     "one-node cluster divides a node"),
    ("nodes_are_shared_out", TINY, [f"{RESOURCES}.num_nodes=2"],
     f"{RESOURCES}.num_nodes: got 2, expected 1; set it to 1: the GPUs of the one node are divided"),
    ("nodes_are_shared_out", TINY, [f"{RESOURCES}.gpus_per_node=2"],
     f"{RESOURCES}.gpus_per_node: got 2, expected less than cluster.gpus_per_node = 2; the rest of the node's GPUs "
     "train; lower it"),
    ("parallel_sizes_divide_the_gpus", SMALL, [f"{RESOURCES}.num_nodes=13"],
     f"{MEGATRON}.tensor_model_parallel_size: got 4, expected TP 4 * CP 8 * PP 1 = 32 to divide the 56 training "
     "GPUs; 7 nodes train; change the sizes or the nodes"),
    ("parallel_sizes_divide_the_gpus", SMALL, ["grpo.num_prompts_per_step=7", "grpo.num_generations_per_prompt=7"],
     "grpo.num_prompts_per_step: got 7, expected P * G = 49 to be a multiple of the data-parallel size; "
     "2 = 64 training GPUs / (TP 4 * CP 8 * PP 1 = 32); change P"),
    ("parallel_sizes_divide_the_gpus", SMALL, ["policy.train_global_batch_size=1", f"{ON_POLICY}=false"],
     "policy.train_global_batch_size: got 1, expected a multiple of the data-parallel size 2; each rank takes as many "
     "rows of an optimizer step as the others; change it, or delete this key"),
    ("parallel_sizes_divide_the_gpus", SMALL, [f"{MEGATRON}.expert_model_parallel_size=24"],
     f"{MEGATRON}.expert_model_parallel_size: got 24, expected EP 24 * ETP 1 = 24 to divide the 64 training GPUs of "
     "a pipeline stage; experts are spread over TP, CP and DP ranks; lower EP"),
    ("engines_divide_the_gpus", SMALL, [f"{VLLM}.tensor_parallel_size=5"],
     f"{VLLM}.tensor_parallel_size: got 5, expected TP 5 * PP 1 to divide the 96 generation GPUs; each engine takes "
     "TP * PP GPUs; change its size or the generation nodes"),
    ("engines_divide_the_gpus", SMALL, [f"{VLLM}.tensor_parallel_size=6"],
     "policy.generation.vllm_cfg.tensor_parallel_size: got 6, expected TP * PP = 6 to divide cluster.gpus_per_node "
     "= 8, or to be a multiple of it; an engine must not end within a node that it shares; change TP or PP"),
    ("engines_divide_the_gpus", SMALL, [f"{VLLM}.expert_parallel_size=4"],
     f"{VLLM}.expert_parallel_size: got 4, expected 1 or {VLLM}.tensor_parallel_size = 8; vLLM's EP is DP * TP, and "
     "asynchronous engines have no data-parallel ranks inside; change one of them"),
    ("engines_divide_the_gpus", SMALL, [f"{VLLM}.expert_parallel_size=16"],
     f"{VLLM}.expert_parallel_size: got 16, expected 1 or {VLLM}.tensor_parallel_size = 8; vLLM's EP is DP * TP, and "
     "asynchronous engines have no data-parallel ranks inside; change one of them"),
    ("sequence_parallel_has_ranks", TINY, [f"{MEGATRON}.sequence_parallel=true"],
     f"{MEGATRON}.sequence_parallel: got true, expected false; {MEGATRON}.tensor_model_parallel_size is 1, so there "
     "are no ranks to split between; set it to false"),
    ("dtypes_agree", TINY, [f"{MEGATRON}.optimizer.bf16=true"],
     f"{MEGATRON}.optimizer.bf16: got true, expected false; delete this key: policy.precision is float32"),
    ("dtypes_agree", STAGE1, [f"{MEGATRON}.pipeline_dtype=float32"],
     f"{MEGATRON}.pipeline_dtype: got float32, expected bfloat16; delete this key"),
    ("clip_norm_is_stated_once", TINY, [f"{MEGATRON}.optimizer.clip_grad=0.5"],
     f"{MEGATRON}.optimizer.clip_grad: got 0.5, expected policy.max_grad_norm = 1.0; delete this key"),
    ("schedule_is_ordered", TINY, [f"{MEGATRON}.optimizer.min_lr=0.1"],
     f"{MEGATRON}.optimizer.min_lr: got 0.1, expected at most {MEGATRON}.optimizer.lr = 0.0002; lower it"),
    ("schedule_is_ordered", TINY, [f"{MEGATRON}.scheduler.lr_decay_style=cosine"],
     f"{MEGATRON}.scheduler.lr_decay_iters: got null, expected a number of steps; lr_decay_style is cosine; give "
     "the number of steps of the decay"),
    ("schedule_is_ordered", TINY, [f"{MEGATRON}.scheduler.lr_decay_iters=2"],
     "policy.megatron_cfg.scheduler.lr_decay_iters: got 2, expected more than "
     "policy.megatron_cfg.scheduler.lr_warmup_iters = 2; raise it, or set it to null for no decay"),
    ("weight_decay_is_that_of_the_schedule", TINY,
     [f"{MEGATRON}.scheduler={{start_weight_decay: 0.01, end_weight_decay: 0.01}}"],
     f"{MEGATRON}.optimizer.weight_decay: got 0, expected {MEGATRON}.scheduler.start_weight_decay = 0.01; only the "
     "schedule's values are used; set one of them to the other"),
    ("weight_decay_does_not_fall", TINY, [f"{MEGATRON}.scheduler.end_weight_decay=0.5"],
     f"{MEGATRON}.scheduler.end_weight_decay: got 0.5, expected {MEGATRON}.scheduler.start_weight_decay = 0; "
     f"{MEGATRON}.scheduler.weight_decay_incr_style is constant; set both to one value, or "
     f"{MEGATRON}.scheduler.weight_decay_incr_style to linear"),
    ("weight_decay_does_not_fall", TINY,
     [f"{MEGATRON}.scheduler.{key}" for key in
      ("start_weight_decay=0.5", "weight_decay_incr_style=linear", "lr_decay_iters=9")],
     f"{MEGATRON}.scheduler.end_weight_decay: got 0, expected at least {MEGATRON}.scheduler.start_weight_decay = 0.5; "
     "weight decay can only rise; raise it, or lower the first value"),
    ("weight_decay_does_not_fall", TINY,
     [f"{MEGATRON}.scheduler.end_weight_decay=0.5", f"{MEGATRON}.scheduler.weight_decay_incr_style=cosine"],
     f"{MEGATRON}.scheduler.lr_decay_iters: got null, expected a number of steps; "
     f"{MEGATRON}.scheduler.weight_decay_incr_style is cosine; give the number of steps of the rise"),
    ("values_belong_to_the_optimizer", TINY, [f"{MEGATRON}.optimizer.sgd_momentum=0.5"],
     f"{MEGATRON}.optimizer.sgd_momentum: got 0.5, expected 0.9; adam does not read it; delete this key, or change "
     f"{MEGATRON}.optimizer.optimizer"),
    ("values_belong_to_the_optimizer", TINY,
     [*SGD, f"{MEGATRON}.optimizer.use_distributed_optimizer=false", f"{MEGATRON}.optimizer.adam_beta2=0.98"],
     f"{MEGATRON}.optimizer.adam_beta2: got 0.98, expected 0.999; sgd does not read it; delete this key, or change "
     f"{MEGATRON}.optimizer.optimizer"),
    ("sgd_is_not_distributed", TINY, SGD,
     f"{MEGATRON}.optimizer.use_distributed_optimizer: got true, expected false; {MEGATRON}.optimizer.optimizer is "
     "sgd, whose state Megatron does not shard; set it to false"),
    ("fused_attention_has_16_bits", TINY, [f"{MEGATRON}.attention_backend=auto"],
     f"{MEGATRON}.attention_backend: got auto, expected local; Transformer Engine attends over packed rows in 16 bits; "
     "set it to local"),
    ("distributed_optimizer_is_there", STAGE1,
     [f"{MEGATRON}.optimizer.use_distributed_optimizer=false",
      f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather=false"],
     f"{MEGATRON}.optimizer.use_precision_aware_optimizer: got true, expected false; "
     f"set it to false, or {MEGATRON}.optimizer.use_distributed_optimizer to true"),
    ("chunked_logprobs_defer_logits", TINY, ["policy.logprob_chunk_size=2048", f"{MEGATRON}.defer_fp32_logits=false"],
     f"{MEGATRON}.defer_fp32_logits: got false, expected true; policy.logprob_chunk_size is 2048: float32 logits are "
     "made per chunk; set one of them"),
    ("ports_do_not_collide", TINY, ["policy.generation.port_range_low=4999"],
     "policy.generation.port_range_high: got 4999, expected more than policy.generation.port_range_low = 4999; no "
     "port would lie in the range; raise it"),
    ("ports_do_not_collide", TINY, ["policy.generation.port_range_high=5500"],
     "policy.generation.port_range_high: got [3000, 5500), expected a range outside [5000, 6000); those belong to: "
     "environment servers; choose others, see recipes/cluster/ports.py"),
    ("equal_bits_have_one_order", TINY, full(age=f"{AGE}=1"), f"{AGE}: got 1, expected 0; {OR_NONE}"),
    ("equal_bits_have_one_order", TINY, full(at_once=f"{AT_ONCE}=2"), f"{AT_ONCE}: got 2, expected 1; {OR_NONE}"),
    ("equal_bits_have_one_order", TINY, full(cache=f"{VLLM}.enable_prefix_caching=true"),
     f"{VLLM}.enable_prefix_caching: got true, expected false; {OR_NONE}"),
    ("equal_bits_have_one_order", TINY, [*full(), "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"],
     f"grpo.batch_multiplier: got 1.5, expected 1.0; {OR_NONE}"),
    ("waits_are_nested", TINY, ["deadlines.rollout=30"],
     "deadlines.rollout: got 30 s, expected at least deadlines.generation = 60 s; it contains that wait; raise it or "
     "lower the other"),
    ("engine_arguments_have_one_place", TINY, ["policy.generation.vllm_kwargs.max_model_len=99"],
     "policy.generation.vllm_kwargs.max_model_len: this engine argument has a key of its own; set "
     "policy.generation.vllm_cfg.max_model_len"),
    ("cohort_is_the_group", TINY,
     ["env.nemo_gym.genrm.resources_servers.genrm_compare.num_rollouts_per_prompt=16"],
     "env.nemo_gym.genrm.resources_servers.genrm_compare.num_rollouts_per_prompt: got 16, expected "
     "grpo.num_generations_per_prompt = 8; compare whole groups: delete this key"),
    ("cohort_is_the_group", CONFIG_DIR / "stage3_rlhf.yaml", [f"{GENRM}.num_rollouts_per_prompt=8"],
     f"{GENRM}.num_rollouts_per_prompt: got 8, expected grpo.num_generations_per_prompt = 16; compare "
     "whole groups: delete this key"),
    ("drafts_fit_one_step", CONFIG_DIR / "tiny/stage4_healing.yaml",
     ["policy.generation.vllm_kwargs.max_num_batched_tokens=256"],
     "policy.generation.vllm_kwargs.max_num_batched_tokens: got 256, expected at least 384; 128 sequences with 2 drafts"
     " each need so many; raise this, or lower max_num_seqs"),
    ("replayed_routes_are_reported", TINY, [f"{VLLM}.enable_return_routed_experts=false"],
     f"{VLLM}.enable_return_routed_experts: got false, expected policy.router_replay.enabled = true; there would be no "
     "route to replay; delete this key"),
    ("replayed_routes_are_reported", STAGE1, [f"{VLLM}.enable_return_routed_experts=true"],
     f"{VLLM}.enable_return_routed_experts: got true, expected policy.router_replay.enabled = false; nothing would "
     "read them; delete this key"),
    ("distillation_has_teachers", TINY, ["grpo.adv_estimator.name=on_policy_distillation"],
     "grpo.adv_estimator.teachers: got {}, expected a teacher, as {default: NAME}; grpo.adv_estimator.name is "
     "on_policy_distillation; change one of them"),
    ("distillation_has_teachers", CONFIG_DIR / "tiny" / "stage3_rlhf.yaml",
     ["grpo.adv_estimator.teachers={default: genrm_model}"],
     "grpo.adv_estimator.teachers: got {\"default\": \"genrm_model\"}, expected {}; grpo.adv_estimator.name is grpo; "
     "change one of them"),
    ("teachers_are_there", CONFIG_DIR / "tiny" / "stage3_rlhf.yaml",
     [*DISTILS, "grpo.adv_estimator.teachers={default: nobody}"],
     "grpo.adv_estimator.teachers.default: env.nemo_gym has no model server nobody with a model or an address of its "
     "own; write one, as for a judge, or correct the name"),
    ("teachers_are_there", CONFIG_DIR / "tiny" / "stage3_rlhf.yaml",
     [*DISTILS, "grpo.adv_estimator.teachers={default: genrm_model, genrm_simple_agnet: genrm_model}"],
     "grpo.adv_estimator.teachers.genrm_simple_agnet: no agent is called genrm_simple_agnet; there is default, "
     "genrm_simple_agent, genrm_simple_agent_reasoning_off, single_step_tool_use_with_argument_comparison_agent; did "
     "you mean genrm_simple_agent?"),
    ("teachers_are_there", CONFIG_DIR / "tiny" / "stage3_rlhf.yaml",
     [*DISTILS, "grpo.adv_estimator.teachers={default: genrm_model}", f"{GENRM_MODEL}.max_model_len=256"],
     f"{GENRM_MODEL}.max_model_len: got 256, expected more than policy.max_total_sequence_length = 256; the longest "
     "rollouts would have no teacher; raise it"),
    ("what_reads_rewards_is_off", CONFIG_DIR / "tiny" / "stage3_rlhf.yaml",
     [*DISTILS, "grpo.adv_estimator.teachers={default: genrm_model}", "grpo.use_dynamic_sampling=true"],
     "grpo.use_dynamic_sampling: got true, expected false; rewards do not decide what is learned "
     "(grpo.adv_estimator.name); write this"),
    ("what_reads_rewards_is_off", STAGE1,
     [f"{MEGATRON}.freeze_trunk=true", "loss_fn.positive_example_nll_weight=0.1"],
     "loss_fn.positive_example_nll_weight: got 0.1, expected 0.0; rewards do not decide what is learned "
     f"({MEGATRON}.freeze_trunk); write this"),
    ("distillation_has_teachers", CONFIG_DIR / "tiny" / "stage3_rlhf.yaml",
     ["grpo.adv_estimator.name=on_policy_distillation", "grpo.adv_estimator.teachers={default: genrm_model}"],
     "loss_fn.reference_policy_kl_penalty: got 0.0001, expected 0; the teacher takes the place of the reference; "
     "write 0"),
    ("pairs_are_compared_once", TINY, ["grpo.adv_estimator.name=dpo", "grpo.num_generations_per_prompt=1"],
     "grpo.num_generations_per_prompt: got 1, expected 2 or more; grpo.adv_estimator.name is dpo, which compares two "
     "answers; raise it"),
    ("pairs_are_compared_once", TINY,
     ["grpo.adv_estimator.name=dpo", "policy.train_global_batch_size=64", "loss_fn.force_on_policy_ratio=false"],
     "policy.train_global_batch_size: got 64, expected grpo.num_prompts_per_step * grpo.num_generations_per_prompt = "
     "128; grpo.adv_estimator.name is dpo, and margins are those before the step; delete this key"),
    ("pairs_are_compared_once", TINY, ["grpo.adv_estimator.name=dpo", "loss_fn.reference_policy_kl_penalty=1e-4"],
     "loss_fn.reference_policy_kl_penalty: got 0.0001, expected 0; dpo.reference_policy_kl_penalty takes its place; "
     "write 0"),
    ("frozen_trunk_has_heads", STAGE1, [f"{MEGATRON}.freeze_trunk=true", "grpo.adv_estimator.name=dpo"],
     f"grpo.adv_estimator.name: got dpo, expected grpo; {MEGATRON}.freeze_trunk is true, so no pairs are learned from; "
     "write grpo"),
    ("frozen_trunk_has_heads", TINY, [f"{MEGATRON}.freeze_trunk=true"],
     f"{MEGATRON}.freeze_trunk: got true, expected false; {MEGATRON}.mtp_num_layers is 0, so that nothing would be "
     "trained; set it to the number of heads"),
    ("frozen_trunk_has_heads", STAGE1, [f"{MEGATRON}.freeze_trunk=true", "loss_fn.reference_policy_kl_penalty=1e-4"],
     f"{MEGATRON}.freeze_trunk: got true, expected false; a model that stays as it is keeps its distance to the "
     "reference; set loss_fn.reference_policy_kl_penalty to 0"),
    ("frozen_trunk_has_heads", STAGE1, [f"{MEGATRON}.freeze_trunk=true", f"{MEGATRON}.peft.enabled=true"],
     f"{MEGATRON}.peft.enabled: got true, expected false; {MEGATRON}.freeze_trunk is true, so adapters would not be "
     "trained; set one to false"),
    ("frozen_trunk_has_heads", STAGE1, [f"{MEGATRON}.freeze_trunk=true", f"{MEGATRON}.mtp_loss_scaling_factor=0"],
     f"{MEGATRON}.mtp_loss_scaling_factor: got 0, expected more than 0; {MEGATRON}.freeze_trunk is true, so nothing "
     "would be trained; raise it"),
    ("frozen_trunk_has_heads", STAGE1,
     [f"{MEGATRON}.freeze_trunk=true", "grpo.adv_estimator.name=on_policy_distillation",
      "grpo.adv_estimator.teachers={default: nl2bash_judge_model}"],
     f"grpo.adv_estimator.name: got on_policy_distillation, expected grpo; {MEGATRON}.freeze_trunk is true, so no "
     "teacher is learned from; write grpo"),
    ("batch_multiplier_has_dynamic_sampling", TINY, ["grpo.batch_multiplier=1.5"],
     "grpo.batch_multiplier: got 1.5, expected 1; the further prompts would be dropped; set "
     "grpo.use_dynamic_sampling, or this to 1"),
    ("length_penalty_starts_above_zero", TINY,
     ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=256"],
     "grpo.reward_shaping.overlong_buffer_length: got 256, expected less than "
     "grpo.reward_shaping.max_response_length = 256; every answer would be punished; lower it"),
    ("greedy_validation_is_sampled_once", TINY, ["policy.generation.val_temperature=0"],
     "grpo.val_num_generations_per_prompt: got 2, expected 1; policy.generation.val_temperature is 0, so all would be "
     "equal; use grpo.val_greedy for both"),
    ("experts_share_the_sequence", STAGE1, [f"{MEGATRON}.sequence_parallel=false"],
     f"{MEGATRON}.sequence_parallel: got false, expected true; TP 4 with EP 16 needs it; set it to true"),
    ("uneven_stages_have_a_pipeline", STAGE1, [f"{MEGATRON}.num_layers_in_first_pipeline_stage=4"],
     f"{MEGATRON}.num_layers_in_first_pipeline_stage: got 4, expected null; "
     f"{MEGATRON}.pipeline_model_parallel_size is 1: there is one stage; set this to null"),
    ("deepep_is_the_flex_dispatcher", STAGE1, [f"{MEGATRON}.moe_enable_deepep=true"],
     f"{MEGATRON}.moe_enable_deepep: got true, expected false; {MEGATRON}.moe_token_dispatcher_type is alltoall; set "
     "it to flex, or this to false"),
    ("deepep_is_the_flex_dispatcher", STAGE1, [f"{MEGATRON}.moe_token_dispatcher_type=flex"],
     f"{MEGATRON}.moe_enable_deepep: got false, expected true; {MEGATRON}.moe_token_dispatcher_type is flex; set this "
     "to true, or that to alltoall"),
    ("deepep_can_carry_the_tokens", STAGE1, [*FLEX, f"{MEGATRON}.moe_router_dtype=fp64"],
     f"{MEGATRON}.moe_router_dtype: got fp64, expected fp32; DeepEP sends the router's shares in this format alone; "
     f"change it, or set {MEGATRON}.moe_enable_deepep to false"),
    ("deepep_can_carry_the_tokens", TINY,
     [*FLEX, f"{MEGATRON}.expert_model_parallel_size=2", "cluster.gpus_per_node=5"],
     "policy.precision: got float32, expected bfloat16; DeepEP sends states of tokens in this format alone; change "
     f"it, or set {MEGATRON}.moe_enable_deepep to false"),
    ("deepep_can_carry_the_tokens", STAGE1, [*FLEX, f"{MEGATRON}.expert_model_parallel_size=1"],
     f"{MEGATRON}.expert_model_parallel_size: got EP 1 * ETP 1 = 1, expected EP * ETP to be one of 2, 4, 8, 16, 24, "
     "32, 64, 128, 144, 160; DeepEP has settings for no other number of ranks; change it, or set "
     f"{MEGATRON}.moe_enable_deepep to false"),
    ("deepep_can_carry_the_tokens", CONFIG_DIR / "stage2_swe1.yaml", [*FLEX, "cluster.gpus_per_node=4"],
     f"{MEGATRON}.expert_model_parallel_size: got EP 8 * ETP 1 = 8, expected EP * ETP to divide "
     "cluster.gpus_per_node = 4; DeepEP goes beyond a node where nodes have 8 GPUs; change it, or set "
     f"{MEGATRON}.moe_enable_deepep to false"),
    ("fused_activation_has_grouped_experts", STAGE1,
     [f"{MEGATRON}.use_fused_weighted_squared_relu=true", f"{MEGATRON}.moe_grouped_gemm=false"],
     f"{MEGATRON}.use_fused_weighted_squared_relu: got true, expected false; {MEGATRON}.moe_grouped_gemm is false; "
     "set it to true, or this to false"),
    ("shared_expert_overlaps_an_exchange", STAGE1,
     [f"{MEGATRON}.moe_shared_expert_overlap=true", f"{MEGATRON}.moe_token_dispatcher_type=allgather"],
     f"{MEGATRON}.moe_shared_expert_overlap: got true, expected false; {MEGATRON}.moe_token_dispatcher_type is "
     "allgather; set this to false, or that to alltoall"),
    ("offloaded_share_is_offloaded", TINY, [f"{MEGATRON}.optimizer.optimizer_offload_fraction=0.5"],
     f"{MEGATRON}.optimizer.optimizer_offload_fraction: got 0.5, expected 0; "
     f"{MEGATRON}.optimizer.optimizer_cpu_offload is false; set both or neither"),
    ("offloaded_share_is_offloaded", TINY, [f"{MEGATRON}.optimizer.overlap_cpu_optimizer_d2h_h2d=true"],
     f"{MEGATRON}.optimizer.overlap_cpu_optimizer_d2h_h2d: got true, expected false; "
     f"{MEGATRON}.optimizer.optimizer_cpu_offload is false, so nothing is copied; set both or neither"),
    ("distributed_optimizer_is_there", TINY,
     [f"{MEGATRON}.optimizer.use_distributed_optimizer=false", f"{MEGATRON}.optimizer.optimizer_cpu_offload=true",
      f"{MEGATRON}.optimizer.optimizer_offload_fraction=0.5",
      f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather=false"],
     f"{MEGATRON}.optimizer.optimizer_cpu_offload: got true, expected false; "
     f"set it to false, or {MEGATRON}.optimizer.use_distributed_optimizer to true"),
    ("judges_fill_their_nodes", STAGE1, ["env.nemo_gym.num_gpu_nodes=6"],
     "env.nemo_gym.num_gpu_nodes: got 6, expected 7 = 4 (genrm_model) + 2 (nl2bash_judge_model) + "
     "1 (safety_judge_model); raise it: judges without a node never start"),
    ("judges_fill_their_nodes", STAGE1, ["env.nemo_gym.num_gpu_nodes=8"],
     "env.nemo_gym.num_gpu_nodes: got 8, expected 7 = 4 (genrm_model) + 2 (nl2bash_judge_model) + "
     "1 (safety_judge_model); lower it: the other nodes would stand idle"),
    ("references_exist", STAGE1,
     ["env.nemo_gym.inverse_if.resources_servers.inverse_if.judge_model_server.name=safety_judge"],
     "env.nemo_gym.inverse_if.resources_servers.inverse_if.judge_model_server: no server is called safety_judge; "
     "did you mean safety_judge_model?"),
    ("references_exist", STAGE1,
     ["env.nemo_gym.ns_tools.resources_servers.ns_tools.verifiers.math_with_judge.name=nothing_like_it"],
     "env.nemo_gym.ns_tools.resources_servers.ns_tools.verifiers.math_with_judge: no server is called "
     "nothing_like_it; add its file to env.nemo_gym.config_paths"),
    ("judges_can_answer", STAGE1,
     ["env.nemo_gym.lc_judge.resources_servers.equivalence_llm_judge.judge_responses_create_params."
      "max_output_tokens=131072"],
     "env.nemo_gym.lc_judge.resources_servers.equivalence_llm_judge.judge_responses_create_params.max_output_tokens: "
     "got 131072, expected less than env.nemo_gym.nl2bash_judge_model.*.vllm_serve_kwargs.max_model_len = 131072; "
     "no question would fit beside the reply; lower it"),
    ("judges_can_answer", STAGE1, [f"{GENRM}.genrm_responses_create_params.max_output_tokens=70000"],
     f"{GENRM}.genrm_responses_create_params.max_output_tokens: got 70000, expected less than "
     "env.nemo_gym.genrm_model.*.vllm_serve_kwargs.max_model_len = 60000; no question would fit beside the reply; "
     "lower it"),
    ("judges_can_answer", CONFIG_DIR / "stage3_rlhf.yaml",
     ["env.nemo_gym.genrm_model.responses_api_models.genrm_model.supports_principle_role=false"],
     f"{GENRM}.use_principle: got true, expected false; env.nemo_gym.genrm_model has no supports_principle_role: set "
     "it there if its template has the role"),
    ("tasks_end_within_a_rollout", CONFIG_DIR / "stage2_swe2.yaml",
     ["env.nemo_gym.swe_agents_train.responses_api_agents.swe_agents.swebench_agent_timeout=13500"],
     "env.nemo_gym.swe_agents_train.responses_api_agents.swe_agents.swebench_agent_timeout: got 13500 + 1200 = "
     "14700 s, expected at most deadlines.rollout = 14400 s; lower swebench_agent_timeout or swebench_tests_timeout, "
     "or raise deadlines.rollout"),
    ("ratio_is_one_kind", TINY,
     ["loss_fn.use_cispo=true", f"{ON_POLICY}=false", "loss_fn.token_level_loss=false"],
     "loss_fn.token_level_loss: got false, expected true; use_cispo weights single tokens; set this to true"),
    ("repositories_have_images", CONFIG_DIR / "stage2_swe2.yaml", ["sif_dir=null"],
     "sif_dir: got null, expected a directory of .sif files, or ???; each task runs in its image; write ??? here and "
     "set SIF_DIR at launch"),
    ("offloaded_share_is_offloaded", TINY, [f"{MEGATRON}.optimizer.optimizer_cpu_offload=true"],
     f"{MEGATRON}.optimizer.optimizer_offload_fraction: got 0, expected more than 0; "
     f"{MEGATRON}.optimizer.optimizer_cpu_offload is true; set both or neither"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "path", "overrides", "line"), CASES, ids=[case[3].split(":")[0] for case in CASES])
def test_contradiction_gives_its_line(rule: str, path: Path, overrides: list[str], line: str) -> None:
    found = [str(problem) for problem in load_config(path, overrides).problems]
    assert [text.split(": ", 1)[1] for text in found] == [line]


def test_every_rule_is_tested() -> None:
    assert {case[0] for case in CASES} == {rule.__name__ for rule in RULES}


def test_what_another_optimizer_reads_is_compared_with_the_base() -> None:
    base = lookup(load_config(CONFIG_DIR / "grpo_base.yaml").tree, f"{MEGATRON}.optimizer")
    assert all(base[name] == value for unread in UNREAD.values() for name, value in unread.items())


def test_stage_with_repository_agents_decides_overlong_filtering() -> None:
    agents = ["env.nemo_gym.swe={responses_api_agents: {swe_agents: {}}}", "sif_dir=images"]
    (problem,) = load_config(TINY, agents).problems
    assert str(problem).split(": ", 1)[1] == (
        "grpo.overlong_filtering: a stage with agents on repositories must set this key itself; say whether tasks "
        "that hit the context limit train, since many do there; the published value is true"
    )
    assert load_config(TINY, [*agents, "grpo.overlong_filtering=false"]).problems == ()
