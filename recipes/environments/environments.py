"""All environments of a run: a row is routed by the name of its agent, the agent runs it, a rollout comes back.

The rest of the project uses only this module. Verifiers run on this machine unless their server instance has a `url`:

    env.nemo_gym.<instance>.resources_servers.<verifier>:
      url: http://host:port     # ask this resources server instead
      timeout_seconds: 120      # a verification that takes longer gives no verdict
      ...                       # settings of the verifier itself (`Verifier.settings`)

A server of a type that the registry does not have needs its `url`. It alone knows what its rows hold, so that a row is
checked for its shape here, and its verdicts are taken as they come.

A failed environment is a value: only an engine's failure and cancellation leave `run` as exceptions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from recipes.environments.agents.by_url.agent import UrlAgents
from recipes.environments.agents.coding.agent import CodingAgents, coding
from recipes.environments.agents.conversation import Episode, refinement, single_turn, tool_loop, unscored
from recipes.environments.agents.programs.rollouts import program_rollout
from recipes.environments.chat.codec import ChatCodec, callable_tools, row_template_kwargs
from recipes.environments.chat.messages import chat_request
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.contract import (
    Agent,
    NoVerdict,
    Response,
    Verifier,
    env_failed,
    optional_object,
    optional_str,
)
from recipes.environments.contract.http import JsonClient
from recipes.environments.instances import (
    ALL_VERIFIERS,
    CODING,
    GROUP_VERIFIERS,
    VERIFIERS,
    ServerInstance,
    agents_of,
    coding_settings_of,
    find_agent,
    servers_of,
)
from recipes.environments.sandbox.client import client_of
from recipes.environments.sandbox.server import SandboxServer
from recipes.environments.scoring.clients import (
    GroupClient,
    HttpGroupClient,
    HttpVerifier,
    InProcessVerifier,
    VerifierClient,
    score_group,
)
from recipes.environments.scoring.known_answers import PROBE_SECONDS, find_wrong_judges
from recipes.environments.scoring.pool import ScoringPool, num_processes
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.environments.swe.contract import ContainerFailedError, Runtime
from recipes.environments.swe.task import MissingImageError
from recipes.errors import LaunchError, Problem, RecipeError, suggestion
from recipes.types import ModelClient, Rollout, RolloutStatus, Row

if TYPE_CHECKING:
    from recipes.config.tree import EnvConfig

logger = logging.getLogger(__name__)

AGENT_KINDS: Mapping[str, Callable[[Episode], Awaitable[Rollout]]] = {
    "refinement": refinement,
    "single_turn": single_turn,
    "tool_loop": tool_loop,
}

UNWORDED = "add environments/{}.yaml to env.nemo_gym.config_paths, or set env.judge_texts=own"
# The keys that a Responses create request may have.
REQUEST_KEYS = frozenset(
    {
        "background",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "reasoning",
        "service_tier",
        "store",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    }
)


# A prompt of the kind that an agent writes itself.
ANY_PROMPT = {
    "input": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
}


class Environments:
    """All agents and verifiers of a run."""

    def __init__(
        self,
        codec: ChatCodec,
        *,
        servers: Mapping[str, ServerInstance],
        agents: Mapping[str, Agent],
        patterns: FlagPatterns,
        coding: CodingAgents | None = None,
        num_on_node: int = 1,
    ) -> None:
        self.codec = codec
        self._agents, self._patterns = agents, patterns
        self._pool = ScoringPool(num_workers=num_processes(num_pools=num_on_node))
        self._sandbox = SandboxServer()
        self._http = JsonClient()
        self._url_agents = UrlAgents()
        self._coding = coding or CodingAgents(settings={}, find_runtime=find_runtime)
        self._set_servers(servers)
        self.asked_for: set[str] = set()  # servers of the rows that were checked

    @classmethod
    def from_config(
        cls, env: EnvConfig, codec: ChatCodec, *, num_sharers: int = 1, num_on_node: int = 1
    ) -> Environments:
        """Return the environments of a configuration; raises `ConfigError` for settings that cannot be honoured.

        `num_sharers` processes ask the same judges: each asks its share of what may be asked at once. `num_on_node` of
        them share the cores of this machine for their scoring processes.
        """
        servers = _shared_servers(env, num_sharers)
        return cls(
            codec,
            servers=servers,
            agents=agents_of(env.nemo_gym.instances, servers),
            coding=CodingAgents(
                settings=coding_settings_of(env.nemo_gym.instances),
                num_sharers=num_sharers,
                find_runtime=find_runtime,
            ),
            patterns=FlagPatterns(
                invalid_tool_call=env.nemo_gym.invalid_tool_call_patterns, thinking_tags=env.nemo_gym.thinking_tags
            ),
            num_on_node=num_on_node,
        )

    def _set_servers(self, servers: Mapping[str, ServerInstance]) -> None:
        self._servers = servers
        self._clients = {
            name: _client(server, self._pool, self._sandbox, self._http) for name, server in servers.items()
        }
        self._groups = {
            name: client for name, client in self._clients.items() if isinstance(client, GroupClient | HttpGroupClient)
        }

    def ask_judges_of(self, env: EnvConfig) -> None:
        """Ask the judges where this configuration says that they are; no rollout may have begun."""
        self._set_servers(_shared_servers(env, num_sharers=1))

    def ask_judges_at(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Ask judges, by name, at these addresses from the next question on."""
        for client in self._clients.values():
            if isinstance(client, InProcessVerifier | GroupClient) and client.judge:
                client.judge.ask_at(addresses)

    def check_row(self, row: Row) -> list[str]:
        """Return what is wrong with one data row, empty when it can be run."""
        problems = []
        try:
            _check_request(row, needs_message=not self._writes_prompt(row))
        except (ValueError, RecursionError) as error:
            problems.append(f"responses_create_params: {error}")
        try:
            agent = find_agent(_agent_name(row), self._agents)
            if not problems and (refusal := self._why_refused(row, agent)):
                problems.append(f"responses_create_params: {refusal}")
            if agent.kind == CODING:
                return problems + self._coding.row_problems(_agent_name(row), row)
            server = self._servers[agent.server]
            self.asked_for.add(server.name)
            verifier = ALL_VERIFIERS.get(server.verifier)
            if verifier is None:  # a type that only its server knows
                return problems
            verifier.parse_task(row, server.settings)
            if server.is_unworded and not verifier.needs_judge(server.settings):  # without a judge those are refused
                problems.append(f"agent '{_agent_name(row)}' needs published words: {UNWORDED.format(server.verifier)}")
            if isinstance(verifier, Verifier) and verifier.tools is not None and server.url is None:
                verifier.tools.start(server.settings)  # a session could not begin without what they read
            if verifier.needs_judge(server.settings) and server.judge is None and server.url is None:
                problems.append(f"agent '{_agent_name(row)}' needs a judge: {server.name} names none with a base_url")
        except (ValueError, RecursionError) as error:  # a row, or JSON text in it, may be nested too deep
            problems.append(str(error))
        return problems

    def _why_refused(self, row: Row, agent: Agent) -> str | None:
        """Return why the chat template cannot show a row and what may follow; None also for an agent elsewhere."""
        params = row["responses_create_params"]
        if not self.codec or agent.kind not in (*AGENT_KINDS, CODING):  # a check of rows may have no codec
            return None
        if agent.kind == CODING and not params.get("input"):  # the agent writes the prompt
            params = {**params, **ANY_PROMPT}
        return self.codec.why_refused(params, agent.template_kwargs, goes_on=agent.kind != "single_turn")

    def wrong_judges(self, servers: Collection[str], *, seconds: float = PROBE_SECONDS) -> list[Problem]:
        """Return what is wrong with the judges of these servers. Blocking; they are asked about known answers."""
        clients = [
            (self._servers[name].verifier, client)
            for name, client in self._clients.items()
            if name in servers and isinstance(client, InProcessVerifier | GroupClient)
        ]

        async def find() -> list[Problem]:
            try:
                return await find_wrong_judges(clients, seconds=seconds)
            finally:
                await self._http.close()

        return asyncio.run(find())

    def _writes_prompt(self, row: Row) -> bool:
        """Return whether the agent of a row writes the prompt itself."""
        with suppress(ValueError):
            return find_agent(_agent_name(row), self._agents).kind == CODING
        return False

    def reserve(self, row: Row, *, seconds: float) -> AbstractAsyncContextManager[None]:
        """Hold the room that a rollout of a row takes on this machine, before it begins.

        Entering raises `RequestError` when there is none within `seconds`.
        """
        if self._writes_prompt(row):
            return self._coding.reserve(_agent_name(row), seconds=seconds)
        return nullcontext()

    async def run(self, row: Row, model: ModelClient, *, max_tokens: int) -> Rollout:
        """Run one rollout of a row; `max_tokens` bounds one model call, a smaller limit of the row wins."""
        start = time.monotonic()
        try:
            agent = find_agent(_agent_name(row), self._agents)
            limit = row["responses_create_params"].get("max_output_tokens")
            episode = Episode(
                row=row,
                codec=self.codec,
                model=model,
                verifier=self._clients.get(agent.server) or _NoServer(),
                patterns=self._patterns,
                max_tokens=min(limit, max_tokens) if limit else max_tokens,
                template_kwargs=agent.template_kwargs,
                max_steps=agent.max_steps,
            )
            if agent.kind == CODING:
                return await self._run_coding(_agent_name(row), episode)
            if agent.url:
                return await self._url_agents.run(episode, agent)
            return await AGENT_KINDS[agent.kind](episode)
        except RecipeError:
            raise
        except Exception as error:  # a failed environment costs its rollout, not the run; the collector counts it
            logger.warning("rollout failed in its environment", exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            return unscored((), RolloutStatus.ENV_FAILED, reason, seconds=time.monotonic() - start)

    async def _run_coding(self, name: str, episode: Episode) -> Rollout:
        """Run a rollout on a repository by our agent, or by the program that the settings name."""
        start = time.monotonic()
        try:
            task, settings, means = self._coding.work_of(name, episode)
        except (ValueError, MissingImageError, ContainerFailedError) as error:
            return unscored((), RolloutStatus.ENV_FAILED, str(error), seconds=time.monotonic() - start)
        if settings.program is None or settings.tests_golden_patch:
            return await coding(episode, task, settings, means)
        return await program_rollout(episode, task, settings, means, self._url_agents)

    async def finish_group(self, row: Row, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Do what can be done only once all rollouts of a row have ended; the result goes to the buffer.

        Today this is one stage: answers that are scored together get their verdicts. Never raises for a failed
        environment, and ends within the time that the row's server has for a group.
        """
        client = self._groups.get(find_agent(_agent_name(row), self._agents).server)
        return tuple(rollouts) if client is None else await score_group(client, row, rollouts)

    def compares(self, row: Row) -> bool:
        """Return whether the answers to a row are scored by comparing them, so that one alone has no verdict."""
        return find_agent(_agent_name(row), self._agents).server in self._groups

    def wrap_verifiers(self, wrap: Callable[[VerifierClient], VerifierClient]) -> None:
        """Replace every verifier client by `wrap` of it; tests simulate slow and failing ones."""
        self._clients = {name: wrap(client) for name, client in self._clients.items()}

    def close(self) -> None:
        """End the scoring workers, the sandbox, the connections and the model servers."""
        self._pool.close()
        self._sandbox.close()
        self._http.close_all()
        self._url_agents.close()


def _shared_servers(env: EnvConfig, num_sharers: int) -> dict[str, ServerInstance]:
    """Return the servers of a configuration, whose judges as many processes ask."""
    return {
        name: replace(server, judge=server.judge.shared_by(num_sharers)) if server.judge else server
        for name, server in servers_of(env.nemo_gym.instances, judge_texts=env.judge_texts).items()
    }


def find_runtime() -> Runtime:
    """Return the program that runs containers on this machine; raises `ContainerFailedError` where there is none."""
    try:
        return runtime_of_machine()
    except LaunchError as error:
        raise ContainerFailedError(str(error)) from error


class _NoServer:
    """What scores nothing: the verifier of an agent whose rollouts hidden tests score."""

    async def open(self, row: Row) -> NoVerdict:
        return env_failed("no server scores the rollouts of this agent")

    async def verify(self, row: Row, response: Response) -> NoVerdict:
        return env_failed("no server scores the rollouts of this agent")


def _client(server: ServerInstance, pool: ScoringPool, sandbox: SandboxServer, http: JsonClient) -> VerifierClient:
    if server.url and server.verifier in GROUP_VERIFIERS:
        return HttpGroupClient(name=server.name, url=server.url, timeout_seconds=server.timeout_seconds, http=http)
    if server.url:
        return HttpVerifier(name=server.name, url=server.url, timeout_seconds=server.timeout_seconds, http=http)
    if server.verifier in GROUP_VERIFIERS:
        return GroupClient(
            name=server.name,
            verifier=GROUP_VERIFIERS[server.verifier],
            settings=server.settings,
            judge=server.judge.client(http) if server.judge else None,
            timeout_seconds=server.timeout_seconds,
        )
    verifier = VERIFIERS[server.verifier]
    return InProcessVerifier(
        name=server.verifier,
        verifier=verifier,
        settings=server.settings,
        pool=pool,
        timeout_seconds=server.timeout_seconds,
        judge=server.judge.client(http) if server.judge else None,
        sandbox=client_of(server.settings, sandbox, http) if verifier.needs_sandbox else None,
    )


def _agent_name(row: Row) -> str:
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    if not isinstance(name, str):
        raise ValueError("no agent_ref.name: the row names no agent to run it")
    return name


def _check_request(row: Row, *, needs_message: bool) -> None:
    """Refuse a request that no model call can be made of."""
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping):
        raise ValueError("the object is missing")
    for key in params:
        if key not in REQUEST_KEYS:
            raise ValueError(f"unknown key '{key}'; {suggestion(key, REQUEST_KEYS)}")
    for key in ("metadata", "reasoning"):
        optional_object(params, key)
    optional_str(params, "instructions")
    limit = params.get("max_output_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_output_tokens: got {limit!r}, expected a positive integer or null")
    request = chat_request(params)
    if needs_message and not request["messages"]:
        raise ValueError("field 'input': got no message, expected at least one")
    row_template_kwargs(params)
    callable_tools(params)
