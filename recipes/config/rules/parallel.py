"""How nodes and GPUs are divided among training, generation and their parallel ranks.

How many rollouts a step has and how the optimizer divides them.

Lengths in tokens: of a rollout, of a request, of a micro-batch.

How tokens reach the experts of the policy, and what runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.derive import derive, has_group_baseline
from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.validation import (
    CP,
    DEEPEP,
    DISPATCHER,
    EP,
    ETP,
    GENERATION,
    GENERATION_PART,
    GPUS,
    MAX_LEN,
    MEGATRON,
    NODES,
    PP,
    SIZES,
    TP,
    VLLM,
    G,
    P,
)
from recipes.config.tree import Config

BATCH = "policy.train_global_batch_size"
ON_POLICY = "loss_fn.force_on_policy_ratio"


def batch_is_prompts_times_generations(config: Config) -> Iterator[KeyProblem]:
    """Require the global batch to be one step's rollouts, or to divide them when the ratio may move."""
    prompts, generations = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    batch, samples = config.policy.train_global_batch_size, prompts * generations
    formula = f"{P} * {G} = {prompts} * {generations} = {samples}"
    also = (P, G, ON_POLICY)
    if config.loss_fn.force_on_policy_ratio and batch != samples:
        fix = "force_on_policy_ratio needs exactly one optimizer step per batch; delete this key"
        yield KeyProblem(key=BATCH, got=str(batch), expected=formula, fix=fix, also=also)
    elif samples % batch:
        yield KeyProblem(
            key=BATCH, got=str(batch), expected=f"a divisor of {formula}", fix="delete this key", also=also
        )


def group_has_a_baseline(config: Config) -> Iterator[KeyProblem]:
    """Require groups of two or more: the baseline of a single rollout is its own reward, so nothing is learned."""
    estimator = config.grpo.adv_estimator
    if config.grpo.num_generations_per_prompt < 2 and has_group_baseline(config):
        baseline = "leave-one-out" if estimator.name == "grpo" and estimator.use_leave_one_out_baseline else "group"
        fix = f"the {baseline} baseline of a group of 1 leaves no advantage; set it to 2 or more"
        yield KeyProblem(key=G, got=str(config.grpo.num_generations_per_prompt), expected="2 or more", fix=fix)


def batch_multiplier_has_dynamic_sampling(config: Config) -> Iterator[KeyProblem]:
    """Require dynamic sampling where more prompts are generated than trained on."""
    multiplier = config.grpo.batch_multiplier
    if multiplier != 1 and not config.grpo.use_dynamic_sampling:
        key, also = "grpo.batch_multiplier", ("grpo.use_dynamic_sampling",)
        fix = "the further prompts would be dropped; set grpo.use_dynamic_sampling, or this to 1"
        yield KeyProblem(key=key, got=f"{multiplier:g}", expected="1", fix=fix, also=also)


def engine_and_trainer_agree_on_length(config: Config) -> Iterator[KeyProblem]:
    """Require one context length: longer rollouts could not be trained on, shorter ones waste the trainer."""
    longest, context = config.policy.max_total_sequence_length, config.policy.generation.vllm_cfg.max_model_len
    key = f"{VLLM}.max_model_len"
    if context != longest:
        fix = "rollouts must fit both the engine and the trainer; delete this key"
        yield KeyProblem(key=key, got=str(context), expected=f"{MAX_LEN} = {longest}", fix=fix, also=(MAX_LEN,))
    asked = config.policy.generation.max_new_tokens
    if asked > context:
        expected, fix = f"at most {key} = {context}", "no request could be that long; lower it"
        own = f"{GENERATION}.max_new_tokens"
        yield KeyProblem(key=own, got=str(asked), expected=expected, fix=fix, also=(key,))


def lengths_are_divisible(config: Config) -> Iterator[KeyProblem]:
    """Require padded lengths that context and sequence parallel ranks can share evenly."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    cp, tp = megatron.context_parallel_size, megatron.tensor_model_parallel_size
    need = (2 * cp if cp > 1 else 1) * (tp if megatron.sequence_parallel else 1)
    multiple = policy.make_sequence_length_divisible_by
    key = "policy.make_sequence_length_divisible_by"
    if multiple % need:
        expected = f"a multiple of {need} (2 * CP {cp} if CP > 1, times TP {tp} if sequence_parallel)"
        also, fix = (CP, TP, f"{MEGATRON}.sequence_parallel"), "delete this key: it follows from CP and TP"
        yield KeyProblem(key=key, got=str(multiple), expected=expected, fix=fix, also=also)
    longest = policy.max_total_sequence_length
    if longest % multiple:
        expected = f"a multiple of {key} = {multiple}"
        fix = f"the longest rollout would be padded past it; lower it to {longest // multiple * multiple}"
        yield KeyProblem(key=MAX_LEN, got=str(longest), expected=expected, fix=fix, also=(key, CP, TP))


def packing_fits_one_rollout(config: Config) -> Iterator[KeyProblem]:
    """Require micro-batches that hold the longest rollout."""
    packing, longest = config.policy.sequence_packing, config.policy.max_total_sequence_length
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(packing, name)
        if packing.enabled and tokens < longest:
            key, expected = f"policy.sequence_packing.{name}", f"{MAX_LEN} = {longest} or more"
            fix = "the longest rollout must fit one micro-batch; delete this key"
            yield KeyProblem(key=key, got=str(tokens), expected=expected, fix=fix, also=(MAX_LEN,))


_DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)  # that release 1.2.1 has settings for
_DEEPEP_NODE = 8  # GPUs of a node, where a group of ranks has several


def deepep_is_the_flex_dispatcher(config: Config) -> Iterator[KeyProblem]:
    """Require the flex dispatcher and DeepEP together: it has no other kernels here, and they serve no other."""
    megatron = config.policy.megatron_cfg
    is_flex, is_on = megatron.moe_token_dispatcher_type == "flex", megatron.moe_enable_deepep
    if is_flex != is_on:
        change = "set it to flex, or this to false" if is_on else "set this to true, or that to alltoall"
        fix = f"{DISPATCHER} is {megatron.moe_token_dispatcher_type}; {change}"
        got, expected = str(is_on).lower(), str(is_flex).lower()
        yield KeyProblem(key=DEEPEP, got=got, expected=expected, fix=fix, also=(DISPATCHER,))


def deepep_can_carry_the_tokens(config: Config) -> Iterator[KeyProblem]:
    """Require what DeepEP's kernels carry: bfloat16 states, float32 shares, between numbers of ranks that it knows."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    if not megatron.moe_enable_deepep:
        return
    formats: dict[str, tuple[str, str, str]] = {
        "policy.precision": (policy.precision, "bfloat16", "states of tokens"),
        f"{MEGATRON}.moe_router_dtype": (megatron.moe_router_dtype, "fp32", "the router's shares"),
    }
    for key, (got, expected, what) in formats.items():
        if got != expected:
            fix = f"DeepEP sends {what} in this format alone; change it, or set {DEEPEP} to false"
            yield KeyProblem(key=key, got=got, expected=expected, fix=fix, also=(DEEPEP,))
    per_node = config.cluster.gpus_per_node
    ranks = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    got = f"EP {megatron.expert_model_parallel_size} * ETP {megatron.expert_tensor_parallel_size} = {ranks}"
    if ranks not in _DEEPEP_RANKS:
        expected = f"EP * ETP to be one of {', '.join(map(str, _DEEPEP_RANKS))}"
        fix = f"DeepEP has settings for no other number of ranks; change it, or set {DEEPEP} to false"
        yield KeyProblem(key=EP, got=got, expected=expected, fix=fix, also=(ETP, DEEPEP))
    elif config.cluster.num_nodes > 1 and per_node % ranks and per_node != _DEEPEP_NODE:
        expected = f"EP * ETP to divide {GPUS} = {per_node}"
        fix = f"DeepEP goes beyond a node where nodes have {_DEEPEP_NODE} GPUs; change it, or set {DEEPEP} to false"
        yield KeyProblem(key=EP, got=got, expected=expected, fix=fix, also=(ETP, GPUS, NODES, DEEPEP))


def fused_activation_has_grouped_experts(config: Config) -> Iterator[KeyProblem]:
    """Require the grouped GEMM where the activation of experts is fused: Megatron fuses it there alone."""
    megatron, needed = config.policy.megatron_cfg, f"{MEGATRON}.moe_grouped_gemm"
    if megatron.use_fused_weighted_squared_relu and not megatron.moe_grouped_gemm:
        key, fix = f"{MEGATRON}.use_fused_weighted_squared_relu", f"{needed} is false; set it to true, or this to false"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(needed,))


def grouped_experts_are_rounded(config: Config) -> Iterator[KeyProblem]:
    """Require bfloat16 where experts are grouped: Transformer Engine multiplies float32 as TF32, with 10 bits."""
    megatron, precision = config.policy.megatron_cfg, "policy.precision"
    if megatron.moe_grouped_gemm and config.policy.precision == "float32":
        key, fix = f"{MEGATRON}.moe_grouped_gemm", f"{precision} is float32, which its kernels round; set this to false"
        yield KeyProblem(key=key, got="true", expected="false (native engine)", fix=fix, also=(precision,))


def shared_expert_overlaps_an_exchange(config: Config) -> Iterator[KeyProblem]:
    """Require an all-to-all exchange where the shared expert runs beside it: Megatron runs it beside no other."""
    megatron = config.policy.megatron_cfg
    if megatron.moe_shared_expert_overlap and megatron.moe_token_dispatcher_type != "alltoall":
        fix = f"{DISPATCHER} is {megatron.moe_token_dispatcher_type}; set this to false, or that to alltoall"
        key = f"{MEGATRON}.moe_shared_expert_overlap"
        yield KeyProblem(key=key, got="true", expected="false", fix=fix, also=(DISPATCHER,))


def nodes_are_shared_out(config: Config) -> Iterator[KeyProblem]:
    """Require that nodes, or GPUs of a single node, remain for training beside those that generate."""
    cluster, part = config.cluster, config.policy.generation.colocated.resources
    nodes, gpus = f"{GENERATION_PART}.num_nodes", f"{GENERATION_PART}.gpus_per_node"
    if cluster.num_nodes == 1:
        if part.num_nodes != 1:
            fix = "set it to 1: the GPUs of the one node are divided"
            yield KeyProblem(key=nodes, got=str(part.num_nodes), expected="1", fix=fix, also=(NODES,))
        if part.gpus_per_node >= cluster.gpus_per_node:
            expected = f"less than {GPUS} = {cluster.gpus_per_node}"
            fix = "the rest of the node's GPUs train; lower it"
            yield KeyProblem(key=gpus, got=str(part.gpus_per_node), expected=expected, fix=fix, also=(NODES, GPUS))
        return
    if part.num_nodes >= cluster.num_nodes:
        expected = f"less than {NODES} = {cluster.num_nodes}"
        fix = f"lower it: {NODES} less the generation nodes train; judges are not part of either"
        yield KeyProblem(key=nodes, got=str(part.num_nodes), expected=expected, fix=fix, also=(NODES,))
    if part.gpus_per_node != cluster.gpus_per_node:
        expected, fix = f"{GPUS} = {cluster.gpus_per_node}", "delete this key: only a one-node cluster divides a node"
        yield KeyProblem(key=gpus, got=str(part.gpus_per_node), expected=expected, fix=fix, also=(NODES, GPUS))


def parallel_sizes_divide_the_gpus(config: Config) -> Iterator[KeyProblem]:
    """Require whole copies of the policy and of its experts, and whole shares of the batch."""
    sizes, megatron = derive(config), config.policy.megatron_cfg
    if sizes.train_gpus <= 0:
        return  # nodes_are_shared_out names it
    tp, cp, pp = (
        megatron.tensor_model_parallel_size,
        megatron.context_parallel_size,
        megatron.pipeline_model_parallel_size,
    )
    formula = f"TP {tp} * CP {cp} * PP {pp} = {sizes.model_parallel_size}"
    if sizes.train_gpus % sizes.model_parallel_size:
        expected = f"{formula} to divide the {sizes.train_gpus} training GPUs"
        fix = f"{sizes.num_train_nodes} nodes train; change the sizes or the nodes"
        yield KeyProblem(key=TP, got=str(tp), expected=expected, fix=fix, also=SIZES)
        return
    if sizes.samples_per_step % sizes.data_parallel_size:
        expected = f"P * G = {sizes.samples_per_step} to be a multiple of the data-parallel size"
        fix = f"{sizes.data_parallel_size} = {sizes.train_gpus} training GPUs / ({formula}); change P"
        also = ("grpo.num_generations_per_prompt", *SIZES)
        got = str(config.grpo.num_prompts_per_step)
        yield KeyProblem(key="grpo.num_prompts_per_step", got=got, expected=expected, fix=fix, also=also)
    elif config.policy.train_global_batch_size % sizes.data_parallel_size:
        key, got = "policy.train_global_batch_size", str(config.policy.train_global_batch_size)
        expected = f"a multiple of the data-parallel size {sizes.data_parallel_size}"
        fix = "each rank takes as many rows of an optimizer step as the others; change it, or delete this key"
        yield KeyProblem(key=key, got=got, expected=expected, fix=fix, also=SIZES)
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    stage_gpus = sizes.train_gpus // pp
    if stage_gpus % (ep * etp):
        expected = f"EP {ep} * ETP {etp} = {ep * etp} to divide the {stage_gpus} training GPUs of a pipeline stage"
        fix = "experts are spread over TP, CP and DP ranks; lower EP"
        yield KeyProblem(key=EP, got=str(ep), expected=expected, fix=fix, also=(ETP, *SIZES))


def engines_divide_the_gpus(config: Config) -> Iterator[KeyProblem]:
    """Require whole engines that lie on one node or on whole nodes."""
    sizes, vllm, per_node = derive(config), config.policy.generation.vllm_cfg, config.cluster.gpus_per_node
    tp, ep = vllm.tensor_parallel_size, vllm.expert_parallel_size
    key, also = f"{VLLM}.tensor_parallel_size", (f"{VLLM}.pipeline_parallel_size", *SIZES)
    if sizes.generation_gpus % sizes.gpus_per_engine:
        expected = f"TP {tp} * PP {vllm.pipeline_parallel_size} to divide the {sizes.generation_gpus} generation GPUs"
        fix = "each engine takes TP * PP GPUs; change its size or the generation nodes"
        yield KeyProblem(key=key, got=str(tp), expected=expected, fix=fix, also=also)
    elif per_node % sizes.gpus_per_engine and sizes.gpus_per_engine % per_node:
        expected = f"TP * PP = {sizes.gpus_per_engine} to divide {GPUS} = {per_node}, or to be a multiple of it"
        fix = "an engine must not end within a node that it shares; change TP or PP"
        yield KeyProblem(key=key, got=str(tp), expected=expected, fix=fix, also=also)
    if ep not in (1, tp):
        expected = f"1 or {key} = {tp}"
        fix = "vLLM's EP is DP * TP, and asynchronous engines have no data-parallel ranks inside; change one of them"
        yield KeyProblem(key=f"{VLLM}.expert_parallel_size", got=str(ep), expected=expected, fix=fix, also=(key,))


def engines_fit_a_node(config: Config) -> Iterator[KeyProblem]:
    """Require engines that lie within one node: no node has a place for a larger one, and the run would wait for it."""
    size, per_node = derive(config).gpus_per_engine, config.cluster.gpus_per_node
    if size > per_node and size % per_node == 0:  # else engines_divide_the_gpus names it
        key, also = f"{VLLM}.tensor_parallel_size", (f"{VLLM}.pipeline_parallel_size", GPUS)
        expected, fix = f"TP * PP to be at most {GPUS} = {per_node}", "an engine lies within one node (native engine)"
        yield KeyProblem(key=key, got=f"TP * PP = {size}", expected=expected, fix=f"{fix}; lower it", also=also)


def sequence_parallel_has_ranks(config: Config) -> Iterator[KeyProblem]:
    """Require tensor-parallel ranks that can split the sequence among them."""
    megatron = config.policy.megatron_cfg
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        fix = f"{TP} is 1, so there are no ranks to split between; set it to false"
        yield KeyProblem(key=f"{MEGATRON}.sequence_parallel", got="true", expected="false", fix=fix, also=(TP,))


def experts_share_the_sequence(config: Config) -> Iterator[KeyProblem]:
    """Require sequence parallelism where tensor- and expert-parallel ranks overlap."""
    megatron = config.policy.megatron_cfg
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    if tp > 1 and ep > 1 and not megatron.sequence_parallel:
        fix = f"TP {tp} with EP {ep} needs it; set it to true"
        yield KeyProblem(key=f"{MEGATRON}.sequence_parallel", got="false", expected="true", fix=fix, also=(TP, EP))


def uneven_stages_have_a_pipeline(config: Config) -> Iterator[KeyProblem]:
    """Require several pipeline stages where the layers of the first or the last one are given."""
    megatron = config.policy.megatron_cfg
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        value = getattr(megatron, name)
        if value is not None and megatron.pipeline_model_parallel_size == 1:
            fix = f"{PP} is 1: there is one stage; set this to null"
            yield KeyProblem(key=f"{MEGATRON}.{name}", got=str(value), expected="null", fix=fix, also=(PP,))
