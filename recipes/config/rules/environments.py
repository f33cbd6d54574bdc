"""Environments and agents: what they refer to, what they need, which of them the native engine has.

Judges and reward models: their nodes, their context, the group that they compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.keys.derive import (
    AGENTS,
    MODELS,
    POLICY,
    REFERENCES,
    RESOURCES,
    STARTED,
    SWE_AGENTS,
    policy_settings,
    references,
    servers,
    started_judges,
)
from recipes.config.keys.native import EXTERNAL_AGENT
from recipes.config.keys.schema import INSTANCES, KeyProblem, is_http_url, resources_types, show
from recipes.config.rules.validation import GPUS, G
from recipes.config.tree import Config
from recipes.errors import nearest

# Of a variant of the policy. Its number of server processes changes nothing: rollouts need none.
HONOURED_IN_VARIANTS = {"chat_template_kwargs", "num_workers"}
# Arguments of `vllm serve` that follow from the judge's other settings, or that address and key depend on.
SET_BY_THE_RUN = frozenset(
    {"api_key", "disable_log_stats", "distributed_executor_backend", "host", "model", "port", "scheduler_cls",
     "served_model_name"}
)  # fmt: skip
SAME_FOR_VARIANTS = {  # settings of a variant of the policy that rollouts fix
    "return_token_id_information": True,
    "sequential_reasoning_allowed": False,
    "uses_reasoning_parser": True,
}


def cohort_is_the_group(config: Config) -> Iterator[KeyProblem]:
    """Require GenRM cohorts of exactly one group: a smaller one gives no signal, a larger one waits for ever."""
    generations = config.grpo.num_generations_per_prompt
    for name, server, settings in servers(config, RESOURCES):
        cohort = settings.get("num_rollouts_per_prompt", generations)
        if server == "genrm_compare" and cohort != generations:
            key, expected = f"{INSTANCES}.{name}.{RESOURCES}.{server}.num_rollouts_per_prompt", f"{G} = {generations}"
            yield KeyProblem(
                key=key, got=str(cohort), expected=expected, fix="compare whole groups: delete this key", also=(G,)
            )


def judges_fill_their_nodes(config: Config) -> Iterator[KeyProblem]:
    """Require as many nodes for judges as their engines need; an engine fits in one node or takes whole nodes."""
    per_node = config.cluster.gpus_per_node
    judges = started_judges(config)
    parts = {judge.name: math.ceil(judge.num_copies * judge.gpus_per_copy / per_node) for judge in judges}
    need, have = sum(parts.values()), config.env.nemo_gym.num_gpu_nodes
    if need != have:
        formula = " + ".join(f"{nodes} ({name})" for name, nodes in parts.items())
        fix = (
            "raise it: judges without a node never start"
            if need > have
            else "lower it: the other nodes would stand idle"
        )
        also = (GPUS, *(f"{INSTANCES}.{name}" for name in parts))
        expected = f"{need} = {formula}" if parts else "0: this stage starts no judge"
        yield KeyProblem(key=f"{INSTANCES}.num_gpu_nodes", got=str(have), expected=expected, fix=fix, also=also)


def judges_can_answer(config: Config) -> Iterator[KeyProblem]:
    """Require room for a reply in the context of the judge that gives it, and a principle's role where one is sent."""
    engines = {name: settings for name, _, settings in servers(config, MODELS)}
    for name, server, settings in servers(config, RESOURCES):
        own = f"{INSTANCES}.{name}.{RESOURCES}.{server}"
        for key, target in references(settings):
            parameters = key.replace("model_server", "responses_create_params")
            asked = settings.get(parameters) or {}
            engine = engines.get(target, {}).get("vllm_serve_kwargs") or {}
            longest, context = asked.get("max_output_tokens", 0), engine.get("max_model_len")
            also = (f"{INSTANCES}.{target}",)
            if context is not None and longest >= context:
                expected = f"less than {also[0]}.*.vllm_serve_kwargs.max_model_len = {context}"
                fix, where = "no question would fit beside the reply; lower it", f"{own}.{parameters}.max_output_tokens"
                yield KeyProblem(key=where, got=str(longest), expected=expected, fix=fix, also=also)
            reads = engines.get(target, {}).get("supports_principle_role")
            if server == "genrm_compare" and settings.get("use_principle") and target in engines and not reads:
                fix = f"{also[0]} has no supports_principle_role: set it there if its template has the role"
                yield KeyProblem(key=f"{own}.use_principle", got="true", expected="false", fix=fix, also=also)


def judges_fit_a_node(config: Config) -> Iterator[KeyProblem]:
    """Require engines of judges that share a node evenly: none crosses nodes, and no GPU of a node is left over."""
    per_node = config.cluster.gpus_per_node
    for judge in started_judges(config):
        if per_node % judge.gpus_per_copy:
            key, expected = f"{judge.key}.vllm_serve_kwargs", f"TP * PP to divide {GPUS} = {per_node}"
            fix = "an engine of a judge lies within one node (native engine); change tensor_parallel_size"
            got = f"TP * PP = {judge.gpus_per_copy}"
            yield KeyProblem(key=key, got=got, expected=expected, fix=fix, also=(GPUS,))


def engines_of_judges_are_ours(config: Config) -> Iterator[KeyProblem]:
    """Refuse engine arguments of judges that the run sets itself."""
    for judge in started_judges(config):
        for name in sorted(judge.engine_arguments):
            if name in SET_BY_THE_RUN or name.startswith("data_parallel_"):
                key, wrong = f"{judge.key}.vllm_serve_kwargs.{name}", "the run sets this argument itself"
                yield KeyProblem(key=key, wrong=wrong, fix="remove it (native engine)")


def models_to_come(config: Config) -> Iterator[KeyProblem]:
    """Refuse judges without an address, and what a variant of the policy changes beyond the template's arguments.

    The policy's own server is the run's, and so are the judges that it starts.
    """
    started = {judge.name for judge in started_judges(config)}
    for name, server, settings in sorted(servers(config, MODELS)):
        if name != POLICY and policy_settings(config.env.nemo_gym.instances, name) is not None:
            yield from _beyond_a_variant(f"{INSTANCES}.{name}.{MODELS}.{server}", settings)
        elif name != POLICY and name not in started and not settings.get("base_url"):
            fix = f"give its base_url, or write its server as {STARTED[1]}: then the run starts it on nodes of its own"
            yield KeyProblem(key=f"{INSTANCES}.{name}", wrong="this judge has no address", fix=fix)


def _beyond_a_variant(where: str, settings: Mapping[str, Any]) -> Iterator[KeyProblem]:
    """Refuse what a variant of the policy sets and rollouts would not heed."""
    for key, value in sorted(settings.items()):
        if key not in HONOURED_IN_VARIANTS | SAME_FOR_VARIANTS.keys():
            fix = "a variant of the policy can set chat_template_kwargs (native engine); remove this key"
            yield KeyProblem(key=f"{where}.{key}", wrong="no code reads this setting of a variant", fix=fix)
        elif value != SAME_FOR_VARIANTS.get(key, value):
            expected = show(SAME_FOR_VARIANTS[key])
            fix = "rollouts of every variant work this way (native engine); remove this key"
            yield KeyProblem(key=f"{where}.{key}", got=show(value), expected=expected, fix=fix)


def to_come(kind: str, name: str) -> KeyProblem:
    """Return the refusal of a server instance that the native engine does not have."""
    wrong = f"the native engine does not have the {kind} {name} yet"
    fix = "leave it and its rows out, or launch with ENGINE=nemo_rl"
    return KeyProblem(key=f"{INSTANCES}.{name}", wrong=wrong, fix=fix)


OVERLONG = "grpo.overlong_filtering"


def references_exist(config: Config) -> Iterator[KeyProblem]:
    """Require every server that another one names: a judge, the policy, the environment of an agent."""
    known = {kind: [name for name, _, _ in servers(config, kind)] for kind in (MODELS, RESOURCES)}
    known[MODELS].append(POLICY)
    known[RESOURCES].extend(resources_types())
    known[MODELS].extend(name for name, block in config.env.nemo_gym.instances.items() if "_copy" in block)
    for kind in (RESOURCES, AGENTS):
        for name, server, settings in servers(config, kind):
            for key, target in references(settings):
                choices = known[REFERENCES.get(key, RESOURCES)]
                if target not in choices:
                    close = nearest(target, choices)
                    fix = f"did you mean {close}?" if close else "add its file to env.nemo_gym.config_paths"
                    where = f"{INSTANCES}.{name}.{kind}.{server}.{key}"
                    also = (f"{INSTANCES}.config_paths", f"{INSTANCES}.{target}")
                    wrong = f"no server is called {target}"
                    yield KeyProblem(key=where, wrong=wrong, fix=fix, also=also)


def repositories_have_images(config: Config) -> Iterator[KeyProblem]:
    """Require a directory of task images for agents on repositories."""
    if config.sif_dir is None and any(server == SWE_AGENTS for _, server, _ in servers(config, AGENTS)):
        fix = "each task runs in its image; write ??? here and set SIF_DIR at launch"
        yield KeyProblem(key="sif_dir", got="null", expected="a directory of .sif files, or ???", fix=fix)


def undecided_keys(config: Config) -> Iterator[KeyProblem]:
    """Yield the keys that a stage with agents on repositories must set itself, whether it has set them or not.

    The caller keeps those whose value comes from the base file.
    """
    if any(server == SWE_AGENTS for _, server, _ in servers(config, AGENTS)):
        wrong = "a stage with agents on repositories must set this key itself"
        fix = "say whether tasks that hit the context limit train, since many do there; the published value is true"
        yield KeyProblem(key=OVERLONG, wrong=wrong, fix=fix)


def agents_sample_from_the_policy(config: Config) -> Iterator[KeyProblem]:
    """Refuse each agent that the native engine cannot reach, or that samples from another model."""
    for name, server, settings in sorted(servers(config, AGENTS)):
        if server == EXTERNAL_AGENT:
            yield from _incomplete(f"{INSTANCES}.{name}.{AGENTS}.{server}", settings)
        model = (settings.get("model_server") or {}).get("name", POLICY)
        if policy_settings(config.env.nemo_gym.instances, model) is None:
            key = f"{INSTANCES}.{name}.{AGENTS}.{server}.model_server.name"
            expected, fix = f"{POLICY}, or a model server that copies it", "name one: rollouts sample from the policy"
            yield KeyProblem(key=key, got=str(model), expected=expected, fix=fix)


def _incomplete(where: str, settings: Mapping[str, Any]) -> Iterator[KeyProblem]:
    """Refuse an agent elsewhere without an address, or without the server that scores its rollouts."""
    url = settings.get("url")
    if not is_http_url(str(url or "")):
        fix = "give the address of the agent's server"
        yield KeyProblem(key=f"{where}.url", got=show(url), expected="http://host:port", fix=fix)
    if not settings.get("resources_server"):
        fix = "name the resources server that scores its rollouts"
        yield KeyProblem(key=f"{where}.resources_server", wrong="it is not set", fix=fix)
