"""What must hold between sizes: lengths, parallelism, nodes, optimizer, ports, waits. See config_rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recipes.cluster.ports import PORT_TABLE
from recipes.config.derive import derive
from recipes.config.schema import Finding
from recipes.config.tree import Config

MEGATRON = "policy.megatron_cfg"
VLLM = "policy.generation.vllm_cfg"
RESOURCES = "policy.generation.colocated.resources"
MAX_LEN = "policy.max_total_sequence_length"
TP, CP, PP = (f"{MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model"))
NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
ENGINE_PORTS = "generation HTTP servers"  # their row of the port table
SIZES = (TP, CP, PP, NODES, GPUS, f"{RESOURCES}.num_nodes", f"{RESOURCES}.gpus_per_node")


def engine_and_trainer_agree_on_length(config: Config) -> Iterator[Finding]:
    """Require one context length: longer rollouts could not be trained on, shorter ones waste the trainer."""
    longest, context = config.policy.max_total_sequence_length, config.policy.generation.vllm_cfg.max_model_len
    if context != longest:
        fix = "rollouts must fit both the engine and the trainer; delete this key"
        yield Finding(
            key=f"{VLLM}.max_model_len", got=str(context), expected=f"{MAX_LEN} = {longest}", fix=fix, also=(MAX_LEN,)
        )
    asked = config.policy.generation.max_new_tokens
    if asked > context:
        expected = f"at most {VLLM}.max_model_len = {context}"
        fix = "no request could be that long; lower it"
        key, also = "policy.generation.max_new_tokens", (f"{VLLM}.max_model_len",)
        yield Finding(key=key, got=str(asked), expected=expected, fix=fix, also=also)


def lengths_are_divisible(config: Config) -> Iterator[Finding]:
    """Require padded lengths that context and sequence parallel ranks can share evenly."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    cp, tp = megatron.context_parallel_size, megatron.tensor_model_parallel_size
    need = (2 * cp if cp > 1 else 1) * (tp if megatron.sequence_parallel else 1)
    multiple = policy.make_sequence_length_divisible_by
    key = "policy.make_sequence_length_divisible_by"
    if multiple % need:
        expected = f"a multiple of {need} (2 * CP {cp} if CP > 1, times TP {tp} if sequence_parallel)"
        also = (CP, TP, f"{MEGATRON}.sequence_parallel")
        yield Finding(key=key, got=str(multiple), expected=expected, fix="delete this key: it is 2*CP*TP", also=also)
    longest = policy.max_total_sequence_length
    if longest % multiple:
        expected = f"a multiple of {key} = {multiple}"
        fix = f"the longest rollout would be padded past it; {longest // multiple * multiple} is the next lower"
        yield Finding(key=MAX_LEN, got=str(longest), expected=expected, fix=fix, also=(key, CP, TP))


def packing_fits_one_rollout(config: Config) -> Iterator[Finding]:
    """Require micro-batches that hold the longest rollout."""
    packing, longest = config.policy.sequence_packing, config.policy.max_total_sequence_length
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(packing, name)
        if packing.enabled and tokens < longest:
            key = f"policy.sequence_packing.{name}"
            fix = "the longest rollout must fit one micro-batch; delete this key"
            yield Finding(key=key, got=str(tokens), expected=f"{MAX_LEN} = {longest} or more", fix=fix, also=(MAX_LEN,))


def nodes_are_shared_out(config: Config) -> Iterator[Finding]:
    """Require something left to train on after generation took its part."""
    cluster, part = config.cluster, config.policy.generation.colocated.resources
    if cluster.num_nodes == 1:
        if part.num_nodes != 1:
            fix = "a one-node cluster is divided by GPUs"
            yield Finding(key=f"{RESOURCES}.num_nodes", got=str(part.num_nodes), expected="1", fix=fix, also=(NODES,))
        if part.gpus_per_node >= cluster.gpus_per_node:
            key, also = f"{RESOURCES}.gpus_per_node", (NODES, GPUS)
            expected = f"less than {GPUS} = {cluster.gpus_per_node}"
            fix = "the rest of the node's GPUs train; lower it"
            yield Finding(key=key, got=str(part.gpus_per_node), expected=expected, fix=fix, also=also)
        return
    if part.num_nodes >= cluster.num_nodes:
        expected = f"less than {NODES} = {cluster.num_nodes}"
        fix = "train nodes = cluster.num_nodes - generation nodes; judges are not part of either"
        yield Finding(key=f"{RESOURCES}.num_nodes", got=str(part.num_nodes), expected=expected, fix=fix, also=(NODES,))
    if part.gpus_per_node != cluster.gpus_per_node:
        key, expected = f"{RESOURCES}.gpus_per_node", f"{GPUS} = {cluster.gpus_per_node}"
        fix = "only a one-node cluster divides a node"
        yield Finding(key=key, got=str(part.gpus_per_node), expected=expected, fix=fix, also=(NODES, GPUS))


def parallel_sizes_divide_the_gpus(config: Config) -> Iterator[Finding]:
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
        yield Finding(key=TP, got=str(tp), expected=expected, fix=fix, also=SIZES)
        return
    if sizes.samples_per_step % sizes.data_parallel_size:
        expected = f"P * G = {sizes.samples_per_step} to be a multiple of the data-parallel size"
        fix = f"{sizes.data_parallel_size} = {sizes.train_gpus} training GPUs / ({formula}); change P"
        also = ("grpo.num_generations_per_prompt", *SIZES)
        got = str(config.grpo.num_prompts_per_step)
        yield Finding(key="grpo.num_prompts_per_step", got=got, expected=expected, fix=fix, also=also)
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    stage_gpus = sizes.train_gpus // pp
    if stage_gpus % (ep * etp):
        expected = f"EP {ep} * ETP {etp} = {ep * etp} to divide the {stage_gpus} training GPUs of a pipeline stage"
        also = (f"{MEGATRON}.expert_tensor_parallel_size", *SIZES)
        fix = "experts are spread over TP, CP and DP ranks; lower EP"
        yield Finding(key=f"{MEGATRON}.expert_model_parallel_size", got=str(ep), expected=expected, fix=fix, also=also)


def engines_divide_the_gpus(config: Config) -> Iterator[Finding]:
    """Require whole engines that lie on one node or on whole nodes."""
    sizes, vllm, per_node = derive(config), config.policy.generation.vllm_cfg, config.cluster.gpus_per_node
    tp, ep = vllm.tensor_parallel_size, vllm.expert_parallel_size
    key, also = f"{VLLM}.tensor_parallel_size", (f"{VLLM}.pipeline_parallel_size", *SIZES)
    if sizes.generation_gpus % sizes.gpus_per_engine:
        expected = f"TP {tp} * PP {vllm.pipeline_parallel_size} to divide the {sizes.generation_gpus} generation GPUs"
        fix = "each engine takes TP * PP GPUs; change its size or the generation nodes"
        yield Finding(key=key, got=str(tp), expected=expected, fix=fix, also=also)
    elif per_node % sizes.gpus_per_engine and sizes.gpus_per_engine % per_node:
        expected = f"TP * PP = {sizes.gpus_per_engine} to divide {GPUS} = {per_node}, or a multiple"
        fix = "an engine must not lie across a part of a node"
        yield Finding(key=key, got=str(tp), expected=expected, fix=fix, also=also)
    if ep > 1 and ep % tp:
        expected, fix = f"1 or a multiple of {key} = {tp}", "vLLM's EP is DP * TP"
        yield Finding(key=f"{VLLM}.expert_parallel_size", got=str(ep), expected=expected, fix=fix, also=(key,))


def sequence_parallel_has_ranks(config: Config) -> Iterator[Finding]:
    """Require tensor-parallel ranks to split the sequence between."""
    megatron = config.policy.megatron_cfg
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        fix = f"{TP} is 1, so there are no ranks to split between; set it to false"
        yield Finding(key=f"{MEGATRON}.sequence_parallel", got="true", expected="false", fix=fix, also=(TP,))


def dtypes_agree(config: Config) -> Iterator[Finding]:
    """Require the optimizer's and the pipeline's dtype to be the policy's."""
    precision, megatron = config.policy.precision, config.policy.megatron_cfg
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        value = getattr(megatron.optimizer, name)
        if value != (precision == dtype):
            key, expected = f"{MEGATRON}.optimizer.{name}", str(precision == dtype).lower()
            fix = f"policy.precision is {precision}"
            yield Finding(key=key, got=str(value).lower(), expected=expected, fix=fix, also=("policy.precision",))
    if megatron.pipeline_dtype != precision:
        key = f"{MEGATRON}.pipeline_dtype"
        also, fix = ("policy.precision",), "delete this key"
        yield Finding(key=key, got=megatron.pipeline_dtype, expected=precision, fix=fix, also=also)


def optimizer_is_consistent(config: Config) -> Iterator[Finding]:
    """Require one clip norm, an ordered schedule, and the distributed optimizer where others build on it."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    optimizer, scheduler = megatron.optimizer, megatron.scheduler
    prefix = f"{MEGATRON}.optimizer"
    if optimizer.clip_grad != policy.max_grad_norm:
        expected = f"policy.max_grad_norm = {policy.max_grad_norm}"
        yield Finding(
            key=f"{prefix}.clip_grad",
            got=str(optimizer.clip_grad),
            expected=expected,
            fix="delete this key",
            also=("policy.max_grad_norm",),
        )
    for key, value in (
        (f"{prefix}.min_lr", optimizer.min_lr),
        (f"{MEGATRON}.scheduler.lr_warmup_init", scheduler.lr_warmup_init),
    ):
        if value > optimizer.lr:
            expected, fix = f"at most {prefix}.lr = {optimizer.lr}", "lower it"
            yield Finding(key=key, got=str(value), expected=expected, fix=fix, also=(f"{prefix}.lr",))
    decay, warmup = scheduler.lr_decay_iters, scheduler.lr_warmup_iters
    if decay is None and scheduler.lr_decay_style != "constant":
        key, also = f"{MEGATRON}.scheduler.lr_decay_iters", (f"{MEGATRON}.scheduler.lr_decay_style",)
        fix = f"lr_decay_style is {scheduler.lr_decay_style}: say over how many steps"
        yield Finding(key=key, got="null", expected="a number of steps", fix=fix, also=also)
    if decay is not None and decay <= warmup:
        key, also = f"{MEGATRON}.scheduler.lr_decay_iters", (f"{MEGATRON}.scheduler.lr_warmup_iters",)
        expected = f"more than {MEGATRON}.scheduler.lr_warmup_iters = {warmup}"
        yield Finding(key=key, got=str(decay), expected=expected, fix="raise it, or null for no limit", also=also)
    if not optimizer.use_distributed_optimizer:
        overlap = f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather"
        dependants = {
            f"{prefix}.use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer,
            overlap: megatron.distributed_data_parallel_config.overlap_param_gather,
        }
        for key in (key for key, is_on in dependants.items() if is_on):
            fix = f"it needs {prefix}.use_distributed_optimizer, which is false"
            also = (f"{prefix}.use_distributed_optimizer",)
            yield Finding(key=key, got="true", expected="false", fix=fix, also=also)


def chunked_logprobs_defer_logits(config: Config) -> Iterator[Finding]:
    """Require deferred float32 logits for the chunked log-softmax."""
    chunk = config.policy.logprob_chunk_size
    key = f"{MEGATRON}.defer_fp32_logits"
    if chunk is not None and not config.policy.megatron_cfg.defer_fp32_logits:
        fix = f"policy.logprob_chunk_size is {chunk}: float32 logits are made per chunk; set one of them"
        yield Finding(key=key, got="false", expected="true", fix=fix, also=("policy.logprob_chunk_size",))


def ports_do_not_collide(config: Config) -> Iterator[Finding]:
    """Require a non-empty range of engine ports that nothing else of the port table uses."""
    low, high = config.policy.generation.port_range_low, config.policy.generation.port_range_high
    key, also = "policy.generation.port_range_high", ("policy.generation.port_range_low",)
    if low >= high:
        expected, fix = f"more than {also[0]} = {low}", "the range is half-open and would be empty"
        yield Finding(key=key, got=str(high), expected=expected, fix=fix, also=also)
    for other in PORT_TABLE:
        if other.name != ENGINE_PORTS and low < other.high and other.low < high:
            fix = f"those belong to: {other.name}; see recipes/cluster/ports.py"
            expected = f"a range outside [{other.low}, {other.high})"
            yield Finding(key=key, got=f"[{low}, {high})", expected=expected, fix=fix, also=also)


def waits_are_nested(config: Config) -> Iterator[Finding]:
    """Require a wait that contains others to be at least as long as the longest of them."""
    contains = {"rollout": ("generation",), "progress": ("rollout", "refit", "train", "checkpoint")}
    for outer, inners in contains.items():
        limit = getattr(config.deadlines, outer)
        inner = max(inners, key=lambda name: float(getattr(config.deadlines, name)))
        longest = getattr(config.deadlines, inner)
        if limit < longest:
            expected = f"at least deadlines.{inner} = {longest:g} s"
            fix = "it contains that wait; raise it or lower the other"
            also = tuple(f"deadlines.{name}" for name in inners)
            yield Finding(key=f"deadlines.{outer}", got=f"{limit:g} s", expected=expected, fix=fix, also=also)


def engine_arguments_have_one_place(config: Config) -> Iterator[Finding]:
    """Refuse engine arguments that have a key of their own."""
    names = {
        "tensor_parallel_size": f"{VLLM}.tensor_parallel_size",
        "pipeline_parallel_size": f"{VLLM}.pipeline_parallel_size",
        "gpu_memory_utilization": f"{VLLM}.gpu_memory_utilization",
        "max_model_len": f"{VLLM}.max_model_len",
        "enforce_eager": f"{VLLM}.enforce_eager",
        "enable_prefix_caching": f"{VLLM}.enable_prefix_caching",
        "kv_cache_dtype": f"{VLLM}.kv_cache_dtype",
        "dtype": f"{VLLM}.precision",
        "model": "policy.model_name",
        "tokenizer": "policy.tokenizer.name",
        "seed": "grpo.seed",
    }
    for name, value in config.policy.generation.vllm_kwargs.items():
        if name in names:
            fix = f"set {names[name]}"
            key = f"policy.generation.vllm_kwargs.{name}"
            yield Finding(key=key, got=str(value), expected="an argument without a key of its own", fix=fix)


CLUSTER_RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    engine_and_trainer_agree_on_length,
    lengths_are_divisible,
    packing_fits_one_rollout,
    nodes_are_shared_out,
    parallel_sizes_divide_the_gpus,
    engines_divide_the_gpus,
    sequence_parallel_has_ranks,
    dtypes_agree,
    optimizer_is_consistent,
    chunked_logprobs_defer_logits,
    ports_do_not_collide,
    waits_are_nested,
    engine_arguments_have_one_place,
)
