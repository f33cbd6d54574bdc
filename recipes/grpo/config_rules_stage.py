"""What must hold between a stage's environments, its reward settings and its schedule. See config_rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recipes.environments.registry import VERIFIERS
from recipes.grpo.config_schema import Finding
from recipes.grpo.config_tree import Config

MEGATRON = "policy.megatron_cfg"
GYM = "env.nemo_gym"
AGENT_TYPES = ("simple_agent",)  # agent servers that run in process
SWE_AGENTS = "swe_agents"
OVERLONG = "grpo.overlong_filtering"


def cohort_is_the_group(config: Config) -> Iterator[Finding]:
    """Require GenRM cohorts of exactly one group: a smaller one gives no signal, a larger one waits for ever."""
    generations = config.grpo.num_generations_per_prompt
    for name, server, settings in servers(config, "resources_servers"):
        cohort = settings.get("num_rollouts_per_prompt", generations)
        if server == "genrm_compare" and cohort != generations:
            key = f"{GYM}.{name}.resources_servers.genrm_compare.num_rollouts_per_prompt"
            expected = f"grpo.num_generations_per_prompt = {generations}"
            also = ("grpo.num_generations_per_prompt",)
            yield Finding(key=key, got=str(cohort), expected=expected, fix="a cohort is one group", also=also)


def batch_multiplier_has_dynamic_sampling(config: Config) -> Iterator[Finding]:
    """Require dynamic sampling for prompts beyond those that are trained on."""
    multiplier = config.grpo.batch_multiplier
    if multiplier != 1 and not config.grpo.use_dynamic_sampling:
        key, also = "grpo.batch_multiplier", ("grpo.use_dynamic_sampling",)
        fix = "the further prompts would be dropped; set grpo.use_dynamic_sampling, or this to 1"
        yield Finding(key=key, got=f"{multiplier:g}", expected="1", fix=fix, also=also)


def length_penalty_starts_above_zero(config: Config) -> Iterator[Finding]:
    """Require a length penalty that begins inside the answer."""
    shaping = config.grpo.reward_shaping
    key = "grpo.reward_shaping.overlong_buffer_length"
    limit = "grpo.reward_shaping.max_response_length"
    if shaping.enabled and shaping.overlong_buffer_length >= shaping.max_response_length:
        expected = f"less than {limit} = {shaping.max_response_length}"
        fix = "every answer would be punished; lower it"
        also = (limit, "grpo.reward_shaping.enabled")
        yield Finding(key=key, got=str(shaping.overlong_buffer_length), expected=expected, fix=fix, also=also)


def greedy_validation_is_sampled_once(config: Config) -> Iterator[Finding]:
    """Refuse several validation rollouts that are all the same."""
    num = config.grpo.val_num_generations_per_prompt
    if config.policy.generation.val_temperature == 0 and num > 1:
        key, also = "grpo.val_num_generations_per_prompt", ("policy.generation.val_temperature",)
        fix = "policy.generation.val_temperature is 0, so all would be equal; use grpo.val_greedy for both"
        yield Finding(key=key, got=str(num), expected="1", fix=fix, also=also)


def experts_share_the_sequence(config: Config) -> Iterator[Finding]:
    """Require sequence parallelism where tensor- and expert-parallel ranks overlap."""
    megatron = config.policy.megatron_cfg
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    if tp > 1 and ep > 1 and not megatron.sequence_parallel:
        also = (f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.expert_model_parallel_size")
        fix = f"TP {tp} with EP {ep} needs it; set it to true"
        yield Finding(key=f"{MEGATRON}.sequence_parallel", got="false", expected="true", fix=fix, also=also)


def uneven_stages_have_a_pipeline(config: Config) -> Iterator[Finding]:
    """Require pipeline stages where their layers are counted."""
    megatron = config.policy.megatron_cfg
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        value = getattr(megatron, name)
        if value is not None and megatron.pipeline_model_parallel_size == 1:
            fix = f"{MEGATRON}.pipeline_model_parallel_size is 1: there is one stage; set this to null"
            also = (f"{MEGATRON}.pipeline_model_parallel_size",)
            yield Finding(key=f"{MEGATRON}.{name}", got=str(value), expected="null", fix=fix, also=also)


def offloaded_share_is_offloaded(config: Config) -> Iterator[Finding]:
    """Require optimizer offloading to have a share, and a share to have offloading."""
    optimizer = config.policy.megatron_cfg.optimizer
    share, is_on = optimizer.optimizer_offload_fraction, optimizer.optimizer_cpu_offload
    if is_on != (share > 0):
        prefix = f"{MEGATRON}.optimizer"
        expected = "more than 0" if is_on else "0"
        fix = f"{prefix}.optimizer_cpu_offload is {str(is_on).lower()}; set both or neither"
        key, also = f"{prefix}.optimizer_offload_fraction", (f"{prefix}.optimizer_cpu_offload",)
        yield Finding(key=key, got=f"{share:g}", expected=expected, fix=fix, also=also)


def undecided_keys(config: Config) -> Iterator[Finding]:
    """Yield what a stage with agents on repositories must say itself; the loader drops what a stage file has set."""
    if any(server == SWE_AGENTS for _, server, _ in servers(config, "responses_api_agents")):
        fix = "tasks that hit the context limit are common there: say whether they train (published: true)"
        got = "only the base's false"
        yield Finding(key=OVERLONG, got=got, expected="a value of the stage's own", fix=fix)


def environments_to_come(config: Config) -> Iterator[Finding]:
    """Refuse environments and agents of the stage that do not exist yet, by name."""
    for kind, known, word in (
        ("resources_servers", tuple(VERIFIERS), "environment"),
        ("responses_api_agents", AGENT_TYPES, "agent"),
    ):
        for name, server, _ in servers(config, kind):
            if server not in known:
                expected = f"one of {', '.join(known)} (native engine)"
                fix = f"the {word} {server} is still to come, and no row of this stage runs without it"
                yield Finding(
                    key=f"{GYM}.{name}.{kind}.{server}", got=f"the {word} {server}", expected=expected, fix=fix
                )


def servers(config: Config, kind: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield instance name, server type and settings of every configured server of a kind."""
    for name, instance in config.env.nemo_gym.instances.items():
        block = instance.get(kind) if isinstance(instance, Mapping) else None
        for server, settings in (block or {}).items():
            yield name, server, settings if isinstance(settings, Mapping) else {}


STAGE_RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    cohort_is_the_group,
    batch_multiplier_has_dynamic_sampling,
    length_penalty_starts_above_zero,
    greedy_validation_is_sampled_once,
    experts_share_the_sequence,
    uneven_stages_have_a_pipeline,
    offloaded_share_is_offloaded,
)
