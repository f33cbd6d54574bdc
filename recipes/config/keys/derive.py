"""Numbers that follow from a configuration and are never typed by hand: nodes, GPUs, ranks, samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.config.keys.judges import started_judges
from recipes.config.tree import AsyncGrpoConfig, Config, GrpoConfig, PolicyConfig


def template_kwargs(policy: PolicyConfig) -> dict[str, Any]:
    """Return the chat template's arguments where a row sets none; the tokenizer's win over the HTTP server's."""
    served = policy.generation.vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs
    return {**(served or {}), **(policy.tokenizer.chat_template_kwargs or {})}


def max_age(cfg: AsyncGrpoConfig) -> int:
    """Return how many optimizer steps old a trained rollout may be: 0 where generation waits for training."""
    return cfg.max_trajectory_age_steps if cfg.enabled else 0


def num_prompts_at_once(cfg: GrpoConfig) -> int:
    """Return how many prompts are drawn for a step before the first of its groups has ended: P, or more."""
    exact = cfg.num_prompts_per_step * cfg.batch_multiplier
    return math.ceil(round(exact, 6))  # in floating point 1.1 * 100 is above 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """One stage's sizes. In a one-node cluster training and generation share the node, not its GPUs."""

    num_train_nodes: int
    num_generation_nodes: int
    num_judge_nodes: int
    num_nodes: int  # what the launcher asks for: cluster.num_nodes + judges
    train_workers_per_node: int  # = GPUs per node that train
    train_gpus: int  # = policy workers
    generation_gpus: int
    judge_gpus: int
    judge_units: int  # GPUs that the judges' engines take: on one machine, all that judges need
    total_gpus: int
    model_parallel_size: int  # TP * PP * CP: GPUs that hold one copy of the policy
    data_parallel_size: int  # train_gpus / model_parallel_size
    num_engines: int
    gpus_per_engine: int  # TP * PP of vLLM
    samples_per_step: int  # P * G
    samples_per_rank: int  # of one data-parallel rank in one step
    max_tokens_per_step: int  # samples_per_step * max_total_sequence_length
    max_train_microbatches: int  # of one rank in one step, when every rollout is as long as allowed
    max_requests_in_flight: int  # samples being generated or waiting: (age + 1) steps
    length_multiple: int  # padded rollouts are a multiple of this many tokens, and so is the longest
    cohort_size: int  # rollouts that a reward model compares with each other; 0 = no such environment

    @property
    def is_one_node(self) -> bool:
        """Whether training and generation share a node."""
        return self.num_train_nodes + self.num_generation_nodes + self.num_judge_nodes > self.num_nodes


def derive(config: Config) -> Derived:
    """Return the sizes that follow from the configuration; a quotient that is not whole is rounded down."""
    policy, cluster = config.policy, config.cluster
    megatron, vllm = policy.megatron_cfg, policy.generation.vllm_cfg
    resources = policy.generation.colocated.resources
    num_judge_nodes = config.env.nemo_gym.num_gpu_nodes

    is_one_node = cluster.num_nodes == 1
    num_train_nodes = 1 if is_one_node else cluster.num_nodes - resources.num_nodes
    train_workers_per_node = cluster.gpus_per_node - (resources.gpus_per_node if is_one_node else 0)
    train_gpus = num_train_nodes * train_workers_per_node
    generation_gpus = resources.num_nodes * resources.gpus_per_node

    model_parallel_size = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    data_parallel_size = train_gpus // model_parallel_size
    gpus_per_engine = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    at_once = num_prompts_at_once(config.grpo) * config.grpo.num_generations_per_prompt
    samples_per_rank = samples // max(data_parallel_size, 1)
    tokens_per_rank = samples_per_rank * policy.max_total_sequence_length
    return Derived(
        num_train_nodes=num_train_nodes,
        num_generation_nodes=resources.num_nodes,
        num_judge_nodes=num_judge_nodes,
        num_nodes=cluster.num_nodes + num_judge_nodes,
        train_workers_per_node=train_workers_per_node,
        train_gpus=train_gpus,
        generation_gpus=generation_gpus,
        judge_gpus=num_judge_nodes * cluster.gpus_per_node,
        judge_units=sum(judge.num_copies * judge.gpus_per_copy for judge in started_judges(config)),
        total_gpus=(cluster.num_nodes + num_judge_nodes) * cluster.gpus_per_node,
        model_parallel_size=model_parallel_size,
        data_parallel_size=data_parallel_size,
        num_engines=generation_gpus // gpus_per_engine,
        gpus_per_engine=gpus_per_engine,
        samples_per_step=samples,
        samples_per_rank=samples_per_rank,
        max_tokens_per_step=samples * policy.max_total_sequence_length,
        max_train_microbatches=-(-tokens_per_rank // policy.sequence_packing.train_mb_tokens),
        max_requests_in_flight=(max_age(config.grpo.async_grpo) + 1) * at_once,
        length_multiple=policy.make_sequence_length_divisible_by,
        cohort_size=_cohort_size(config),
    )


def _cohort_size(config: Config) -> int:
    for instance in config.env.nemo_gym.instances.values():
        servers = instance.get("resources_servers") if isinstance(instance, Mapping) else None
        settings = (servers or {}).get("genrm_compare")
        if settings is not None:
            return int(settings.get("num_rollouts_per_prompt", config.grpo.num_generations_per_prompt))
    return 0
