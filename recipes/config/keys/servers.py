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
