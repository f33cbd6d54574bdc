"""What must hold between a stage's environments, its reward settings and its schedule. See config_rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from recipes.config.schema import Finding, show
from recipes.config.tree import Config
from recipes.environments.instances import AGENT_TYPES
from recipes.environments.registry import VERIFIERS

MEGATRON = "policy.megatron_cfg"
GYM = "env.nemo_gym"
SWE_AGENTS = "swe_agents"
POLICY = "policy_model"  # the instance that is the policy itself
MODELS, AGENTS, RESOURCES = "responses_api_models", "responses_api_agents", "resources_servers"
REFERENCES = {
    "resources_server": RESOURCES,
    "model_server": MODELS,
    "judge_model_server": MODELS,
    "genrm_model_server": MODELS,
}  # settings that name another instance, and its kind
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


def judges_fill_their_nodes(config: Config) -> Iterator[Finding]:
    """Require as many nodes for judges as the judges that are started there take, each on whole nodes or within one."""
    per_node = config.cluster.gpus_per_node
    parts = {}
    for name, _, settings in sorted(servers(config, MODELS)):
        engine = settings.get("vllm_serve_kwargs")
        if isinstance(engine, Mapping):
            copies, tp, pp = (engine.get(f"{kind}_parallel_size", 1) for kind in ("data", "tensor", "pipeline"))
            parts[name] = math.ceil(copies * tp * pp / per_node)
    need, have = sum(parts.values()), config.env.nemo_gym.num_gpu_nodes
    if need != have:
        formula = " + ".join(f"{nodes} ({name})" for name, nodes in parts.items())
        fix = "judges that find no node are never placed" if need > have else "the others would stand idle"
        also = ("cluster.gpus_per_node", *(f"{GYM}.{name}" for name in parts))
        expected = f"{need} = {formula}" if parts else "0: no judge is started by this stage"
        yield Finding(key=f"{GYM}.num_gpu_nodes", got=str(have), expected=expected, fix=fix, also=also)


def references_exist(config: Config) -> Iterator[Finding]:
    """Require every server that another one names: a judge, the policy, the environment of an agent."""
    known = {kind: [name for name, _, _ in servers(config, kind)] for kind in (MODELS, RESOURCES)}
    known[MODELS].append(POLICY)
    known[RESOURCES].extend(VERIFIERS)
    known[MODELS].extend(name for name, block in config.env.nemo_gym.instances.items() if "_copy" in block)
    for kind in (RESOURCES, AGENTS):
        for name, server, settings in servers(config, kind):
            for key, target in _references(settings):
                choices = known[REFERENCES.get(key, RESOURCES)]
                if target not in choices:
                    close = get_close_matches(target, choices, n=1)
                    fix = f"did you mean {close[0]}?" if close else "add its file to env.nemo_gym.config_paths"
                    where = f"{GYM}.{name}.{kind}.{server}.{key}"
                    also = (f"{GYM}.config_paths", f"{GYM}.{target}")
                    yield Finding(key=where, got=target, expected="a server that is configured", fix=fix, also=also)


def _references(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of a server that name another one, with that name."""
    further = settings.get("verifiers") or {}
    named = {key: settings.get(key) for key in REFERENCES} | {f"verifiers.{key}": further[key] for key in further}
    if settings.get("should_use_judge") is False:
        del named["judge_model_server"]
    for key, reference in named.items():
        if isinstance(reference, Mapping) and isinstance(reference.get("name"), str):
            yield key, reference["name"]


def judges_can_answer(config: Config) -> Iterator[Finding]:
    """Require room for a reply in the context of the judge that gives it, and a principle's role where one is sent."""
    engines = {name: settings for name, _, settings in servers(config, MODELS)}
    for name, server, settings in servers(config, RESOURCES):
        for key, target in _references(settings):
            asked = settings.get(key.replace("model_server", "responses_create_params")) or {}
            engine = engines.get(target, {}).get("vllm_serve_kwargs") or {}
            longest, context = asked.get("max_output_tokens", 0), engine.get("max_model_len")
            if context is not None and longest >= context:
                where = f"{GYM}.{name}.{RESOURCES}.{server}.{key.replace('model_server', 'responses_create_params')}"
                also = f"{GYM}.{target}"
                expected = f"less than {also}.*.vllm_serve_kwargs.max_model_len = {context}"
                fix = "no question would fit beside the reply; lower it"
                yield Finding(
                    key=f"{where}.max_output_tokens", got=str(longest), expected=expected, fix=fix, also=(also,)
                )
            reads = engines.get(target, {}).get("supports_principle_role")
            if server == "genrm_compare" and settings.get("use_principle") and target in engines and not reads:
                fix = f"{GYM}.{target} has no supports_principle_role: set it there if its template has the role"
                where, also = f"{GYM}.{name}.{RESOURCES}.{server}.use_principle", f"{GYM}.{target}"
                yield Finding(key=where, got="true", expected="false", fix=fix, also=(also,))


def tasks_end_within_a_rollout(config: Config) -> Iterator[Finding]:
    """Require a rollout to wait for as long as a whole task may take."""
    limit = config.deadlines.rollout
    for name, server, settings in servers(config, AGENTS):
        if server == SWE_AGENTS:
            parts = [settings.get(f"swebench_{part}_timeout", 0) for part in ("agent", "tests")]
            if sum(parts) > limit:
                where = f"{GYM}.{name}.{AGENTS}.{server}"
                fix = "lower swebench_agent_timeout or swebench_tests_timeout, or raise deadlines.rollout"
                got = f"{parts[0]} + {parts[1]} = {sum(parts)} s"
                also = ("deadlines.rollout",)
                expected = f"at most deadlines.rollout = {limit:g} s"
                yield Finding(key=f"{where}.swebench_agent_timeout", got=got, expected=expected, fix=fix, also=also)


def repositories_have_images(config: Config) -> Iterator[Finding]:
    """Require a directory of task images for agents on repositories."""
    if config.sif_dir is None and any(server == SWE_AGENTS for _, server, _ in servers(config, AGENTS)):
        fix = "each task runs in its image; write ??? here and set SIF_DIR at launch"
        yield Finding(key="sif_dir", got="null", expected="a directory of .sif files, or ???", fix=fix)


def undecided_keys(config: Config) -> Iterator[Finding]:
    """Yield what a stage with agents on repositories must say itself; the loader drops what a stage file has set."""
    if any(server == SWE_AGENTS for _, server, _ in servers(config, AGENTS)):
        fix = "tasks that hit the context limit are common there: say whether they train (published: true)"
        got = "only the base's false"
        yield Finding(key=OVERLONG, got=got, expected="a value of the stage's own", fix=fix)


def environments_to_come(config: Config) -> Iterator[Finding]:
    """Refuse environments, and agents of existing ones, that are not built, one line each."""
    missing = sorted(name for name, server, _ in servers(config, RESOURCES) if server not in VERIFIERS)
    yield from (_to_come("environment", name) for name in missing)
    for name, server, settings in sorted(servers(config, AGENTS)):
        reference = settings.get("resources_server") or {}
        if server not in AGENT_TYPES and reference.get("name") not in missing:
            yield _to_come("agent", name)


def models_to_come(config: Config) -> Iterator[Finding]:
    """Refuse judges and variants of the policy; the policy's own server is the run's, with its chat template."""
    own = config.policy.tokenizer.chat_template_kwargs
    for name, server, settings in sorted(servers(config, MODELS)):
        asked = settings.get("chat_template_kwargs")
        if name != POLICY:
            yield _to_come("variant of the policy" if "_copy" in config.env.nemo_gym.instances[name] else "judge", name)
        elif asked is not None and asked != own:
            key = f"{GYM}.{name}.{MODELS}.{server}.chat_template_kwargs"
            expected = f"policy.tokenizer.chat_template_kwargs = {show(own)} (native engine)"
            fix = "rollouts take the template's arguments from there; set both or neither"
            yield Finding(key=key, got=show(asked), expected=expected, fix=fix)


def _to_come(word: str, name: str) -> Finding:
    got, expected = f"the {word} {name}", "one that is built (native engine)"
    return Finding(key=f"{GYM}.{name}", got=got, expected=expected, fix="it is still to come")


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
    judges_fill_their_nodes,
    references_exist,
    judges_can_answer,
    tasks_end_within_a_rollout,
    repositories_have_images,
)
