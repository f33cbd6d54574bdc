"""Environments and agents: what they refer to, what they need, which of them the native engine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.keys.native import EXTERNAL_AGENT, RESOURCES_TYPES
from recipes.config.keys.schema import INSTANCES, KeyProblem, show
from recipes.config.keys.servers import (
    AGENTS,
    MODELS,
    POLICY,
    REFERENCES,
    RESOURCES,
    SWE_AGENTS,
    policy_settings,
    references,
    servers,
)
from recipes.config.tree import Config
from recipes.errors import nearest

OVERLONG = "grpo.overlong_filtering"


def references_exist(config: Config) -> Iterator[KeyProblem]:
    """Require every server that another one names: a judge, the policy, the environment of an agent."""
    known = {kind: [name for name, _, _ in servers(config, kind)] for kind in (MODELS, RESOURCES)}
    known[MODELS].append(POLICY)
    known[RESOURCES].extend(RESOURCES_TYPES)
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
    if not str(url or "").startswith(("http://", "https://")):
        fix = "give the address of the agent's server"
        yield KeyProblem(key=f"{where}.url", got=show(url), expected="http://host:port", fix=fix)
    if not settings.get("resources_server"):
        fix = "name the resources server that scores its rollouts"
        yield KeyProblem(key=f"{where}.resources_server", wrong="it is not set", fix=fix)
