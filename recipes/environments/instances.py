"""Server instances of the configuration (`env.nemo_gym.<name>`), as NeMo Gym writes them.

An instance holds one server of one kind. Three kinds are read: resources servers of the verifiers that exist here, the
agents that use them, and the model servers: judges, and the policy with other template arguments. A setting that no
code reads is refused. A resources server of any other type is asked at its `url`; without one it is ignored until a
row needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipes.config.keys.native import AGENT_TYPES, EXTERNAL_AGENT
from recipes.config.keys.servers import POLICY, SWE_AGENTS, policy_settings
from recipes.environments.agents.coding.settings import CodingSettings, coding_settings
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.environments.judges.servers import SETTINGS as JUDGE_SETTINGS
from recipes.environments.judges.servers import JudgeServer, judge_of, settings_of_judge
from recipes.environments.registry import AGENTS, ALL_VERIFIERS, CODING, GROUP_VERIFIERS, VERIFIERS
from recipes.errors import ConfigError, Problem, suggestion

REFINEMENT = "proof_refinement_agent"
DESCRIPTIVE = frozenset({"description", "domain", "entrypoint", "host", "name", "num_workers", "value", "verified"})
CONNECTION = frozenset({"url", "timeout_seconds"})
AGENT_SECONDS = 3600.0  # for one rollout of an agent at a URL
DEFAULT_TIMEOUT_SECONDS = 120.0  # for one verification; waiting for a free scoring process does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInstance:
    """One resources server: which verifier, where, with which settings."""

    name: str
    verifier: str  # a name of the registry, or the type of a server that only its `url` knows
    url: str | None
    timeout_seconds: float
    settings: Mapping[str, Any]
    judge: JudgeServer | None = None  # of a verifier that needs one and is not asked over HTTP


def servers_of(instances: Mapping[str, Any]) -> dict[str, ServerInstance]:
    """Return all resources servers by instance name: those that verifiers bring, then the configured ones over them.

    Raises `ConfigError` with every setting that cannot be honoured.
    """
    problems: list[Problem] = []
    servers = {}
    models = {name: (kind, settings) for name, kind, settings in _of_kind(instances, "responses_api_models")}
    for kind, verifier in ALL_VERIFIERS.items():
        for name, settings in {kind: {}, **verifier.servers}.items():
            servers[name] = _server(name, kind, settings, problems)
    for name, kind, settings in _of_kind(instances, "resources_servers"):
        if kind in VERIFIERS:
            servers[name] = replace(_server(name, kind, settings, problems), judge=judge_of(settings, models))
        elif kind in GROUP_VERIFIERS:
            own = GROUP_VERIFIERS[kind]
            judge = judge_of(settings, models, judge=own.judge, concurrency=own.concurrency)
            servers[name] = replace(_server(name, kind, settings, problems), judge=judge)
        elif settings.get("url") is not None:
            servers[name] = _server(name, kind, settings, problems)
    if problems:
        raise ConfigError(problems)
    return {name: _with_delegate(server, servers) for name, server in servers.items()}


def _with_delegate(server: ServerInstance, servers: Mapping[str, ServerInstance]) -> ServerInstance:
    """Give a server that hands its verdicts to another one's verifier that one's settings and judge."""
    settings = server.settings
    asked = (settings.get("verifiers") or {}).get(settings.get("default_verifier")) or {}
    delegate = servers.get(asked.get("name", ""))
    if delegate is None:
        return server
    return replace(server, settings={**delegate.settings, **settings}, judge=delegate.judge)


def agents_of(instances: Mapping[str, Any], servers: Mapping[str, ServerInstance]) -> dict[str, Agent]:
    """Return the agents whose resources server exists by name: those that verifiers bring, and the configured ones.

    Each renders prompts with the template's arguments of the model server that it samples from.
    """
    own = _template_kwargs(instances, {})
    agents = {name: replace(agent, template_kwargs={**own, **agent.template_kwargs}) for name, agent in AGENTS.items()}
    for name, kind, settings in _of_kind(instances, "responses_api_agents"):
        if kind == SWE_AGENTS:
            agents[name] = Agent(kind=CODING, server="", template_kwargs=_template_kwargs(instances, settings))
            continue
        reference = settings.get("resources_server") or {}
        if kind in AGENT_TYPES and reference.get("name") in servers:
            agent = _agent(kind, settings, servers[reference["name"]])
            agents[name] = replace(agent, template_kwargs=_template_kwargs(instances, settings))
    return agents


def coding_settings_of(instances: Mapping[str, Any]) -> dict[str, CodingSettings]:
    """Return the settings of the agents on repositories; raises `ConfigError` with all that cannot be honoured."""
    problems: list[Problem] = []
    found = {}
    for name, kind, settings in _of_kind(instances, "responses_api_agents"):
        if kind == SWE_AGENTS:
            try:
                found[name] = coding_settings(f"env.nemo_gym.{name}.responses_api_agents.{kind}", settings)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def _agent(kind: str, settings: Mapping[str, Any], server: ServerInstance) -> Agent:
    """Return one agent as its type and its environment have it run."""
    if kind == REFINEMENT:
        return Agent(kind="refinement", server=server.name, max_steps=1 + int(settings.get("max_correction_turns", 2)))
    if kind == EXTERNAL_AGENT:
        return Agent(
            kind="by_url",
            server=server.name,
            max_steps=settings.get("max_steps"),
            url=settings["url"],
            timeout_seconds=float(settings.get("timeout_seconds", AGENT_SECONDS)),
            keeps_history=settings.get("history", "keep") == "keep",
            trains_main_only=settings.get("train", "all") == "main",
        )
    verifier = ALL_VERIFIERS.get(server.verifier)
    may_have_tools = verifier is None or (isinstance(verifier, Verifier) and verifier.tools is not None)
    has_tools = kind == "simple_agent" and may_have_tools
    return Agent(
        kind="tool_loop" if has_tools else "single_turn", server=server.name, max_steps=settings.get("max_steps")
    )


def _template_kwargs(instances: Mapping[str, Any], agent: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the template arguments of the policy, or of its variant, that an agent samples from.

    A variant has those that it copies, too. The codec has further ones, of the run; these come before them.
    """
    model = (agent.get("model_server") or {}).get("name", POLICY)
    return (policy_settings(instances, model) or {}).get("chat_template_kwargs") or {}


def _of_kind(instances: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for name, block in instances.items():
        for server, settings in (block.get(kind) or {}).items():
            yield name, server, settings or {}


def _server(name: str, verifier: str, settings: Mapping[str, Any], problems: list[Problem]) -> ServerInstance:
    where = f"env.nemo_gym.{name}.resources_servers.{verifier}"
    group = GROUP_VERIFIERS.get(verifier)
    own = ALL_VERIFIERS[verifier].settings if verifier in ALL_VERIFIERS else frozenset()
    fixed = VERIFIERS[verifier].fixed if verifier in VERIFIERS else {}
    of_judge = settings_of_judge(group.judge) if group else JUDGE_SETTINGS
    for key, value in settings.items():
        if key in fixed and value != fixed[key]:
            expected, fix = f"{fixed[key]!r}, the one value that this verifier has", "correct it, or leave it out"
            problems.append(Problem(where=f"{where}.{key}", got=repr(value), expected=expected, fix=fix))
        elif key not in own | fixed.keys() | CONNECTION | DESCRIPTIVE | of_judge:
            fix = suggestion(key, own | CONNECTION)
            problems.append(Problem(where=f"{where}.{key}", wrong="no code reads this setting", fix=fix))
    default = group.seconds if group else DEFAULT_TIMEOUT_SECONDS
    url, seconds = settings.get("url"), settings.get("timeout_seconds", default)
    if url is not None and not str(url).startswith(("http://", "https://")):
        expected, fix = "http://host:port", "give the address of the server"
        problems.append(Problem(where=f"{where}.url", got=str(url), expected=expected, fix=fix))
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
        expected, fix = "a positive number of seconds", "correct it"
        problems.append(Problem(where=f"{where}.timeout_seconds", got=repr(seconds), expected=expected, fix=fix))
        seconds = default
    return ServerInstance(
        name=name,
        verifier=verifier,
        url=url,
        timeout_seconds=float(seconds),
        settings={key: value for key, value in settings.items() if key in own and not settings.get("url")},
    )
