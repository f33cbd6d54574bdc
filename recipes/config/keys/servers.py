"""Server instances of `env.nemo_gym`: agents, models and resources servers, and which of them name which others.

An instance is `NAME: {KIND: {TYPE: {settings}}}`, as NeMo Gym writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.keys.schema import SERVER_KINDS
from recipes.config.tree import Config

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
