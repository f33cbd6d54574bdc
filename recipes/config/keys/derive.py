"""What follows from a configuration and is never typed by hand: nodes, GPUs, ranks, samples, servers, judges.

A server instance of `env.nemo_gym` is `NAME: {KIND: {TYPE: {settings}}}`, as NeMo Gym writes it: an agent, a model or a
resources server. Its settings may name other instances.

Some judges are started by the run itself. A model server of a type in STARTED is such a judge, unless it has an address
(`base_url`). Its `vllm_serve_kwargs` are the arguments of `vllm serve`; `data_parallel_size` says how many copies of
the model there are, each of them an engine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from recipes.config.keys.schema import SERVER_KINDS
from recipes.config.tree import AsyncGrpoConfig, Config, GrpoConfig, PeftConfig, PolicyConfig

STARTED = ("genrm_model", "local_vllm_model")
TEACHER_OF_ALL = "default"  # in place of an agent: the teacher of all rows that have no other
DISTILLATION = "on_policy_distillation"  # the estimator whose advantages come from teachers
PREFERENCE = "dpo"  # the one that learns from pairs of answers


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedJudge:
    """One judge model and its engines."""

    name: str  # of its instance
    server: str  # type of its server
    model: str  # directory or hub name; requests ask for it by this name
    num_copies: int
    gpus_per_copy: int  # tensor parallel * pipeline parallel size
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)  # without the number of copies
    variables: Mapping[str, str] = field(default_factory=dict)  # of the engines' environment

    @property
    def key(self) -> str:
        """The key of the configuration that holds the judge."""
        return f"env.nemo_gym.{self.name}.{MODELS}.{self.server}"


def started_judges(config: Config) -> tuple[StartedJudge, ...]:
    """Return the judges that the run starts, by name."""
    found = []
    for name, server, settings in sorted(servers(config, MODELS), key=lambda entry: entry[0]):
        if server not in STARTED or settings.get("base_url"):
            continue
        arguments = dict(settings.get("vllm_serve_kwargs") or {})
        found.append(
            StartedJudge(
                name=name,
                server=server,
                model=str(settings.get("model", "")),
                num_copies=arguments.pop("data_parallel_size", 1),
                gpus_per_copy=arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1),
                engine_arguments=arguments,
                variables={key: str(value) for key, value in (settings.get("vllm_serve_env_vars") or {}).items()},
            )
        )
    return tuple(found)


RESOURCES, MODELS, AGENTS = SERVER_KINDS
POLICY = "policy_model"  # the instance that is the policy itself
SWE_AGENTS = "swe_agents"  # the type of agents on repositories
REFERENCES = {
    "resources_server": RESOURCES,
    "model_server": MODELS,
    "judge_model_server": MODELS,
    "genrm_model_server": MODELS,
}  # settings that name another instance, and the kind of that instance


def servers(config: Config, kind: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield instance name, server type and settings of every configured server of a kind."""
    for name, instance in config.env.nemo_gym.instances.items():
        block = instance.get(kind) if isinstance(instance, Mapping) else None
        for server, settings in (block or {}).items():
            yield name, server, settings if isinstance(settings, Mapping) else {}


def references(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each setting of a server that names another instance, with the name; not that of a judge switched off."""
    further = settings.get("verifiers") or {}
    named = {key: settings.get(key) for key in REFERENCES} | {f"verifiers.{key}": further[key] for key in further}
    if settings.get("should_use_judge") is False:
        del named["judge_model_server"]
    for key, reference in named.items():
        if isinstance(reference, Mapping) and isinstance(reference.get("name"), str):
            yield key, reference["name"]


def policy_settings(instances: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the settings of the policy's server, or of a variant: an instance that copies it and changes some.

    None for a server that is neither, and for copies that go in a circle.
    """
    chain: list[Mapping[str, Any]] = []
    while name != POLICY:
        block = instances.get(name)
        if not isinstance(block, Mapping) or "_copy" not in block or len(chain) == len(instances):
            return None
        chain.append(block)
        name = block["_copy"]
    settings: dict[str, Any] = {}
    for block in (instances.get(POLICY) or {}, *reversed(chain)):
        for own in (block.get(MODELS) or {}).values():
            settings = _laid_over(settings, own or {})
    return settings


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _laid_over(below[key], above[key]) for key in below.keys() & above.keys()
              if isinstance(below[key], Mapping) and isinstance(above[key], Mapping)}  # fmt: skip
    return {**below, **above, **nested}


def template_kwargs(policy: PolicyConfig) -> dict[str, Any]:
    """Return the chat template's arguments where a row sets none; the tokenizer's win over the HTTP server's."""
    served = policy.generation.vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs
    return {**(served or {}), **(policy.tokenizer.chat_template_kwargs or {})}


def max_age(cfg: AsyncGrpoConfig) -> int:
    """Return how many optimizer steps old a trained rollout may be: 0 where generation waits for training."""
    return cfg.max_trajectory_age_steps if cfg.enabled else 0


def rewards_teach(config: Config) -> bool:
    """Whether rewards decide what is learned: not from teachers or pairs, and not where heads alone are trained."""
    by_rewards = config.grpo.adv_estimator.name not in (DISTILLATION, PREFERENCE)
    return by_rewards and not config.policy.megatron_cfg.freeze_trunk


def keeps_start(config: Config) -> bool:
    """Whether the policy is compared with its start weights, which are then kept in host memory."""
    return config.loss_fn.reference_policy_kl_penalty > 0 or config.grpo.adv_estimator.name == PREFERENCE


def has_group_baseline(config: Config) -> bool:
    """Whether a rollout is compared with the others of its group, so that one alone, or all alike, teach nothing."""
    estimator = config.grpo.adv_estimator
    return rewards_teach(config) and (estimator.name == "grpo" or estimator.minus_baseline)


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


def is_adapted(module: str, peft: PeftConfig) -> bool:
    """Return whether a linear layer gets an adapter; `module` is its name within a layer of the model."""
    is_excluded = any(fnmatchcase(module, pattern) for pattern in peft.exclude_modules)
    return module.rpartition(".")[2] in peft.target_modules and not is_excluded
