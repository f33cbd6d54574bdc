"""Server instances of the configuration (`env.nemo_gym.<name>`), as NeMo Gym writes them.

An instance holds one server of one kind. Three kinds are read: resources servers of the verifiers that exist here, the
agents that use them, and the model servers: judges, and the policy with other template arguments. A setting that no
code reads is refused. A resources server of any other type is asked at its `url`; without one it is ignored until a
row needs it.

All verifiers, and the routing of a row to one of them by its `agent_ref.name`. A verifier is a file in `verifiers/`;
`contract/verifier.py` says what it declares.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonschema import Draft202012Validator

from recipes.config.keys.derive import POLICY, RESOURCES, SWE_AGENTS, policy_settings
from recipes.config.keys.schema import CONFIG_DIR, describe, is_http_url, resources_types, schema, settings_of, show
from recipes.config.tree import build
from recipes.config.tree.servers import AGENT_TYPES, ExternalAgent, ProofRefinementAgent
from recipes.environments import verifiers
from recipes.environments.agents.coding.settings import CodingSettings, coding_settings
from recipes.environments.contract import (
    NOT_SET,
    OWN,
    PUBLISHED,
    Agent,
    GroupVerifier,
    Key,
    PublishedText,
    TextError,
    Verifier,
    keys_of,
)
from recipes.environments.scoring.judge_servers import JudgeServer, judge_of
from recipes.errors import ConfigError, Problem, suggestion
from recipes.files import tree_sha256


def _declared_in(folder: ModuleType) -> Iterator[tuple[str, Verifier | GroupVerifier]]:
    """Yield name and VERIFIER of every file of a folder; raises `ConfigError` for a file that declares none."""
    for entry in sorted(pkgutil.iter_modules(folder.__path__), key=lambda entry: entry.name):
        if entry.ispkg:
            continue
        verifier = getattr(importlib.import_module(f"{folder.__name__}.{entry.name}"), "VERIFIER", None)
        if not isinstance(verifier, Verifier | GroupVerifier):
            where, expected = f"{folder.__name__}.{entry.name}", "a Verifier or a GroupVerifier called VERIFIER"
            fix = "declare it, or move what is no verifier to checks/"
            raise ConfigError(Problem(where=where, got=repr(verifier), expected=expected, fix=fix))
        for key, setting in keys_of(verifier.settings).items():
            if setting.default is MISSING:
                where, fix = (
                    f"{folder.__name__}.{entry.name}: {key}",
                    "give it one; NOT_SET is never shown",
                )
                raise ConfigError(Problem(where=where, wrong="this setting has no default", fix=fix))
        yield entry.name, verifier


ALL_VERIFIERS: Mapping[str, Verifier | GroupVerifier] = dict(_declared_in(verifiers))
VERIFIERS: Mapping[str, Verifier] = {name: own for name, own in ALL_VERIFIERS.items() if isinstance(own, Verifier)}
GROUP_VERIFIERS: Mapping[str, GroupVerifier] = {
    name: own for name, own in ALL_VERIFIERS.items() if isinstance(own, GroupVerifier)
}

CODING = "coding"  # the kind of agents on repositories: hidden tests score them, no server does
CODING_AGENTS = ("swe_agents_train", "swe_agents_val")

AGENTS: Mapping[str, Agent] = {
    **{name: agent for verifier in ALL_VERIFIERS.values() for name, agent in verifier.agents.items()},
    **{name: Agent(kind=CODING, server="") for name in CODING_AGENTS},
}


def find_agent(name: str, configured: Mapping[str, Agent]) -> Agent:
    """Return the agent of a name, configured ones first; raises `ValueError` saying why there is none."""
    agent = configured.get(name) or AGENTS.get(name)
    if agent is not None:
        return agent
    raise ValueError(f"unknown agent '{name}'; {suggestion(name, {*AGENTS, *configured})}")


OURS = "this project"  # the source of a text that was not published
DESCRIPTIVE = frozenset({"description", "domain", "entrypoint", "host", "name", "num_workers", "value", "verified"})
CONNECTION = frozenset({"url", "timeout_seconds"})
DEFAULT_TIMEOUT_SECONDS = 120.0  # for one verification; waiting for a free scoring process does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInstance:
    """One resources server: which verifier, where, with which settings."""

    name: str
    verifier: str  # a name of the registry, or the type of a server that only its `url` knows
    url: str | None
    timeout_seconds: float
    settings: Any  # as the verifier declares them; None for a type that only its `url` knows
    judge: JudgeServer | None = None  # of a verifier that needs one and is not asked over HTTP
    is_unworded: bool = False  # no configuration has it, so that it would use words of ours in place of published ones


def servers_of(instances: Mapping[str, Any], *, judge_texts: str = OWN) -> dict[str, ServerInstance]:
    """Return all resources servers by instance name: those that verifiers bring, then the configured ones over them.

    With `PUBLISHED` the configured ones ask in the published words, which are read here; `OWN` is for tiny runs and for
    whoever only reads rows. Raises `ConfigError` with every setting that cannot be honoured.
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
    if judge_texts == PUBLISHED and not problems:
        for name in instances.keys() & servers.keys():
            servers[name] = _with_published_texts(servers[name], problems)
        servers = without_own_words(servers, instances)
    if problems:
        raise ConfigError(problems)
    return {name: _with_delegate(server, servers) for name, server in servers.items()}


def reading_servers(instances: Mapping[str, Any], judge_texts: str) -> dict[str, ServerInstance]:
    """Return the servers that a check of rows reads them with: it refuses what the run would, and reads no text."""
    servers = servers_of(instances)
    return without_own_words(servers, instances) if judge_texts == PUBLISHED else servers


def without_own_words(servers: Mapping[str, ServerInstance], instances: Mapping[str, Any]) -> dict[str, ServerInstance]:
    """Mark the servers whose published texts no configuration asks for; `Environments` refuses rows of theirs."""
    return {
        name: replace(server, is_unworded=name not in instances and bool(texts_of(server)))
        for name, server in servers.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeText:
    """One text that a server asks with: whose it is, and its hash."""

    name: str  # server and setting
    source: str  # where it was published, "the configuration", or OURS
    sha256: str = ""  # "" = a published one that is missing
    problem: Problem | None = None  # why it is missing


def judge_texts_of(instances: Mapping[str, Any], judge_texts: str) -> list[JudgeText]:
    """Return the texts that the configured servers ask with; raises `ConfigError` for a wrong setting."""
    servers, found = servers_of(instances), []
    for name in sorted(instances.keys() & servers.keys()):
        asked = _delegate_of(servers[name], servers) or servers[name]  # in whose words it asks
        for setting, text in texts_of(asked).items():
            given = getattr(asked.settings, setting)
            where = f"{name}.{setting}"
            if given:  # an empty one is none: the verifier would ask in words of its own
                found.append(JudgeText(name=where, source="the configuration", sha256=_sha256(given)))
            elif judge_texts != PUBLISHED:
                found.append(JudgeText(name=where, source=OURS, sha256=_own_words_sha256(asked.verifier)))
            else:
                found.append(replace(_published_text(f"{asked.name}.{setting}", text), name=where))
    return found


def _own_words_sha256(verifier: str) -> str:
    """Hash the words that the file of a verifier has for its judge: all texts that it gives a name."""
    names = vars(importlib.import_module(f"{verifiers.__name__}.{verifier}"))
    return _sha256(
        "\n".join(f"{name} {text}" for name, text in sorted(names.items()) if name.isupper() and isinstance(text, str))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file or directory that a setting of a verifier names, and the hash of what it holds."""

    name: str  # server and setting
    value: str  # as the setting names it
    path: Path  # where it lies
    sha256: str = ""  # "" = it is missing or cannot be read
    problem: Problem | None = None  # why; none for a default that nobody has asked for


def named_files_of(instances: Mapping[str, Any], *, root: Path = CONFIG_DIR.parent) -> list[NamedFile]:
    """Return the files that settings of the configured servers name, as code in `root` finds them.

    Raises `ConfigError` for a wrong setting.
    """
    servers, found = servers_of(instances), []
    for name in sorted(instances.keys() & servers.keys()):
        verifier = VERIFIERS.get(servers[name].verifier)
        if verifier is None or servers[name].url is not None:
            continue
        defaults = verifier.files(verifier.settings())
        for setting, value in verifier.files(servers[name].settings).items():
            file = NamedFile(name=f"{name}.{setting}", value=value, path=root / value)
            try:
                found.append(replace(file, sha256=tree_sha256(file.path)))
            except OSError as error:
                wrong = f"{value} names {file.path}, which cannot be read ({error.strerror})"
                fix = "correct the path: a whole one, or one relative to the checkout"
                problem = Problem(where=f"env.nemo_gym.{file.name}", wrong=wrong, fix=fix)
                found.append(replace(file, problem=None if defaults.get(setting) == value else problem))
    return found


def _published_text(where: str, text: PublishedText) -> JudgeText:
    try:
        return JudgeText(name=where, source=text.source, sha256=_sha256(text.read()))
    except TextError as error:
        problem = Problem(where=f"env.nemo_gym.{where}", wrong=error.wrong, fix=error.fix)
        return JudgeText(name=where, source=text.source, problem=problem)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def texts_of(server: ServerInstance) -> Mapping[str, PublishedText]:
    """Return the published texts that a server would ask with; none for one that asks nobody, or is asked elsewhere."""
    own = ALL_VERIFIERS.get(server.verifier)
    return own.texts(server.settings) if own and server.url is None else {}


def _with_published_texts(server: ServerInstance, problems: list[Problem]) -> ServerInstance:
    found = {}
    for setting, text in texts_of(server).items():
        if getattr(server.settings, setting):
            continue
        try:
            found[setting] = text.read()
        except TextError as error:
            where = f"env.nemo_gym.{server.name}.{setting}"
            problems.append(Problem(where=where, wrong=error.wrong, fix=error.fix))
    return replace(server, settings=replace(server.settings, **found)) if found else server


def _delegate_of(server: ServerInstance, servers: Mapping[str, ServerInstance]) -> ServerInstance | None:
    """Return the server whose verifier gives the verdicts of another one, and asks its judge."""
    named = getattr(server.settings, "verifiers", None)  # by the name that rows and `default_verifier` give them
    return servers.get((named.get(server.settings.default_verifier) or {}).get("name", "")) if named else None


def _with_delegate(server: ServerInstance, servers: Mapping[str, ServerInstance]) -> ServerInstance:
    """Give a server that hands its verdicts to another one's verifier that one's settings and judge."""
    delegate = _delegate_of(server, servers)
    if delegate is None:
        return server
    return replace(server, settings=replace(server.settings, scores_as=delegate.settings), judge=delegate.judge)


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
    own = build(AGENT_TYPES[kind], settings)
    if isinstance(own, ProofRefinementAgent):
        return Agent(kind="refinement", server=server.name, max_steps=1 + own.max_correction_turns)
    if isinstance(own, ExternalAgent):
        return Agent(
            kind="by_url",
            server=server.name,
            max_steps=own.max_steps,
            url=own.url,
            timeout_seconds=own.timeout_seconds,
            keeps_history=own.history == "keep",
            trains_main_only=own.train == "main",
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
    where = f"env.nemo_gym.{name}.{RESOURCES}.{verifier}"
    own = ALL_VERIFIERS.get(verifier)
    declared = keys_of(own.settings) if own else {}
    found = [
        *_unread(where, settings, declared),
        *_wrong_values(where, verifier, {key: settings[key] for key in settings if key in declared}),
    ]
    default = own.seconds if isinstance(own, GroupVerifier) else DEFAULT_TIMEOUT_SECONDS
    url, seconds = settings.get("url"), settings.get("timeout_seconds", default)
    if url is not None and not is_http_url(str(url)):
        expected, fix = "http://host:port", "give the address of the server"
        found.append(Problem(where=f"{where}.url", got=str(url), expected=expected, fix=fix))
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
        expected, fix = "a positive number of seconds", "correct it"
        found.append(Problem(where=f"{where}.timeout_seconds", got=repr(seconds), expected=expected, fix=fix))
        seconds = default
    problems.extend(found)
    read = {} if found or url else {key: value for key, value in settings.items() if key in declared}
    made = build(own.settings, read) if own else None
    return ServerInstance(name=name, verifier=verifier, url=url, timeout_seconds=float(seconds), settings=made)


def _unread(where: str, settings: Mapping[str, Any], declared: Mapping[str, Key]) -> Iterator[Problem]:
    """Yield a problem for each setting that no code reads, or of which the native engine has another value alone."""
    fixed = {name: key.default for name, key in declared.items() if key.has_one_value}
    never = {name for name, value in fixed.items() if value is NOT_SET}
    for name, value in settings.items():
        if name in never or name not in declared.keys() | CONNECTION | DESCRIPTIVE:
            fix = suggestion(name, (declared.keys() - fixed.keys()) | CONNECTION)
            yield Problem(where=f"{where}.{name}", wrong="no code reads this setting", fix=fix)
        elif name in fixed and value != fixed[name]:
            expected, fix = f"{fixed[name]!r}, the one value that this verifier has", "correct it, or leave it out"
            yield Problem(where=f"{where}.{name}", got=repr(value), expected=expected, fix=fix)


def _wrong_values(where: str, verifier: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each value that configs/schema.json does not allow."""
    nodes = settings_of(resources_types().get(verifier, {}))
    for name, value in settings.items():
        if name not in nodes:
            fix = "run `make config-keys`, which writes what the verifiers declare"
            yield Problem(where=f"{where}.{name}", wrong="configs/schema.json does not have it yet", fix=fix)
        found = {}
        for error in Draft202012Validator({**nodes.get(name, {}), "$defs": schema()["$defs"]}).iter_errors(value):
            node: Any = error.schema if "description" in error.schema else nodes[name]
            key = ".".join([where, name, *(str(part) for part in error.absolute_path)])
            fix = f"meaning: {node['description']}"
            found[key] = Problem(where=key, got=show(error.instance), expected=describe(node), fix=fix)
        yield from found.values()
