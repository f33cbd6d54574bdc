"""How nodes and GPUs are divided among training, generation and their parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.config.keys.derive import derive
from recipes.config.keys.schema import KeyProblem
from recipes.config.rules.names import EP, ETP, GENERATION_PART, GPUS, MEGATRON, NODES, PP, SIZES, TP, VLLM
from recipes.config.tree import Config


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
