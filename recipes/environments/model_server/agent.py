"""An agent by its URL: a program of somebody else, which gets a row and samples from its rollout's own model server.

    POST <url>/run    the row, with model_server: {base_url: ".../r/SECRET/v1", model: "policy"}
    200               a JSON object, once the agent is done; what it adds to the row goes to the verifier

The verifier scores the main path of the calls that the agent made: the one with the most calls. All paths are trained
with its reward, each call once. What the bounds on a rollout's sequences leave out is `lost_share`, a share of the
sampled tokens, and a rollout that lost more than half of them is kept out of the loss. With the setting `train: main`
only the main path is trained, and what is beside it is `ignored_share`, which keeps nothing out of the loss. A rollout
has no reward when the agent failed, was late, or made no call, and when the engine gave no answer to its last call: an
agent may go on without it, and report what it has.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from recipes.cluster.ports import AGENT_PORTS, hold_in_range
from recipes.environments.agents.coding.outcome import error_kind
from recipes.environments.agents.episode import Episode, awaiting_group, scored, unscored
from recipes.environments.chat.codec import row_template_kwargs
from recipes.environments.contract.responses import (
    Item,
    function_call_item,
    function_call_output_item,
    message_item,
    reasoning_item,
    response_object,
)
from recipes.environments.contract.verdict import NoVerdict, Pending
from recipes.environments.contract.verifier import Agent
from recipes.environments.http.client import JsonClient, RefusedError
from recipes.environments.model_server.forest import CallNode
from recipes.environments.model_server.replies import MODEL
from recipes.environments.model_server.sequences import Sequences, sequences_of
from recipes.environments.model_server.server import ListeningServer
from recipes.environments.model_server.session import MAX_CALLS, RolloutSession, SessionLimits
from recipes.retry import NoReplyError, RetryPolicy, TransientError, reply_within
from recipes.types import Rollout, RolloutStatus

MAX_LOST = 0.5  # of the sampled tokens; a rollout that loses more is kept out of the loss
CONNECTIONS = 4096  # each rollout holds one while its agent works
RETRIES = RetryPolicy(max_retries=2, first_seconds=0.5, jitter=0.25)  # of an agent that has not begun


class _NotDoneError(Exception):
    """The agent gave no result, for this reason."""

    def __init__(self, status: RolloutStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True, kw_only=True, eq=False)
class UrlAgents:
    """Runs the rollouts of agents by URL, and the model servers that they need: one per address and event loop."""

    http: JsonClient = field(default_factory=lambda: JsonClient(connections=CONNECTIONS))
    _servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[ListeningServer]]] = field(
        default_factory=WeakKeyDictionary
    )

    async def run(self, episode: Episode, agent: Agent) -> Rollout:
        """Let an agent work on a row and return its rollout; raises `EngineError` when no engine is left."""
        start = time.monotonic()
        session = RolloutSession(
            codec=episode.codec,
            model=episode.model,
            patterns=episode.patterns,
            limits=SessionLimits(max_tokens=episode.max_tokens, num_calls=episode.max_steps or MAX_CALLS),
            template_kwargs=row_template_kwargs(episode.params),
            keeps_history=agent.keeps_history,
        )
        server = await self.server_for(urlsplit(agent.url).hostname or "")
        end = await self._end(episode, agent, session, server)
        kept = sequences_in(session, main_only=agent.trains_main_only)
        if isinstance(end, NoVerdict):
            turns = kept.turns(0) if kept.paths else ()
            rollout = unscored(turns, end.status, end.reason, seconds=time.monotonic() - start)
            return replace(rollout, metrics=session_metrics(session, kept), branches=kept.branches())
        return await _with_verdict(episode, session, kept, end, start=start)

    def close(self) -> None:
        """End the servers and the connections."""
        for servers in self._servers.values():
            for starting in servers.values():
                if starting.done() and not starting.cancelled() and starting.exception() is None:
                    starting.result().stop()
        self.http.close_all()

    async def _end(
        self, episode: Episode, agent: Agent, session: RolloutSession, server: ListeningServer
    ) -> Mapping[str, Any] | NoVerdict:
        """Return what the agent adds to its row, or why its work gets no verdict."""
        try:
            reply = await self._result(episode, agent, session, server)
        except _NotDoneError as end:
            if end.status is RolloutStatus.TIMED_OUT or not session.failure:
                return NoVerdict(status=end.status, reason=str(end))
            return NoVerdict(status=RolloutStatus.ABORTED, reason=f"{no_answer(session)}; {end}")
        if session.failure:
            return NoVerdict(status=RolloutStatus.ABORTED, reason=no_answer(session))
        return reply

    async def _result(
        self, episode: Episode, agent: Agent, session: RolloutSession, server: ListeningServer
    ) -> Mapping[str, Any]:
        """Return what the agent adds to its row; raises `_NotDoneError`.

        Each attempt has a path of its own: an agent whose answer was lost may only begin to work later.
        """

        async def ask() -> Mapping[str, Any]:
            async with server.serving(session) as base_url:
                body = {**episode.row, "model_server": {"base_url": base_url, "model": MODEL}}
                try:
                    reply = await self.http.post(f"{agent.url.rstrip('/')}/run", body)
                except TransientError as error:
                    if session.num_calls:  # a second run would mix its calls with those of the first
                        raise RefusedError(str(error)) from error
                    raise
            return {key: value for key, value in reply.body.items() if key not in body}

        asking = asyncio.create_task(reply_within(agent.timeout_seconds, ask, RETRIES))
        failing = asyncio.create_task(session.engine_failed.wait())
        try:
            await asyncio.wait({asking, failing}, return_when=asyncio.FIRST_COMPLETED)
            if session.engine_failure is not None:
                raise session.engine_failure
            return await asking
        except NoReplyError as error:
            is_late = isinstance(error.__cause__, TimeoutError)
            status = RolloutStatus.TIMED_OUT if is_late else RolloutStatus.ENV_FAILED
            raise _NotDoneError(status, f"agent {agent.url}: {error}") from error
        except (RefusedError, TypeError) as error:  # TypeError: a row that JSON cannot carry
            raise _NotDoneError(RolloutStatus.ENV_FAILED, f"agent {agent.url}: {error}") from error
        finally:
            asking.cancel()
            failing.cancel()
            await asyncio.gather(asking, failing, return_exceptions=True)

    async def server_for(self, agent_host: str) -> ListeningServer:
        """Return the server on the address from which this machine reaches an agent; the first caller starts it."""
        servers = self._servers.setdefault(asyncio.get_running_loop(), {})
        address = await asyncio.to_thread(own_address, agent_host)
        starting = servers.get(address)
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception() is not None)):
            held = hold_in_range(AGENT_PORTS.low, AGENT_PORTS.high, host=address)
            starting = servers[address] = asyncio.create_task(ListeningServer.start(held))
        return await asyncio.shield(starting)


def no_answer(session: RolloutSession) -> str:
    """Return why the work of an agent, whose last question we could not answer, is not its own."""
    return f"the agent's last model call had no answer: {session.failure}"


def own_address(host: str) -> str:
    """Return this machine's address in the network through which it reaches a host; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


async def _with_verdict(
    episode: Episode, session: RolloutSession, kept: Sequences, reply: Mapping[str, Any], *, start: float
) -> Rollout:
    """Ask the verifier about what an agent has done."""
    if not kept.paths:
        reason = "the agent made no model call" if not session.num_calls else "the agent took no answer of the model"
        return unscored((), RolloutStatus.ABORTED, reason, seconds=time.monotonic() - start)
    turns = kept.turns(0)
    is_cut = session.is_full or turns[-1].finish_reason == "length"
    response = response_object(transcript(kept.paths[0]), incomplete_reason="max_output_tokens" if is_cut else None)
    asked = time.monotonic()
    verdict = await episode.verifier.verify(episode.row, {**response, "agent_reply": dict(reply)})
    seconds, env_seconds = time.monotonic() - start, time.monotonic() - asked
    if isinstance(verdict, NoVerdict):
        rollout = unscored(turns, verdict.status, verdict.reason, seconds=seconds)
    elif isinstance(verdict, Pending):
        rollout = awaiting_group(turns, verdict, is_cut=is_cut, seconds=seconds)
    else:
        rollout = scored(turns, verdict, is_cut=is_cut, seconds=seconds)
    return replace(
        rollout,
        branches=kept.branches(),
        is_flagged=rollout.is_flagged or kept.lost_share > MAX_LOST or session.counts["suffix_mismatches"] > 0,
        output_text=episode.codec.decode(turns[-1].token_ids, prompt_ids=turns[-1].prompt_token_ids).text,
        metrics={**rollout.metrics, **session_metrics(session, kept), **error_metrics(reply)},
        env_seconds=env_seconds,
    )


def error_metrics(reply: Mapping[str, Any]) -> dict[str, float]:
    """Return the kind of `error` that an agent reports beside its result, 1 for that kind; nothing without one."""
    error = reply.get("error")
    kind = error_kind(error) if isinstance(error, str) else None
    return {} if kind is None else {f"agent_error/{kind}": 1.0}


def sequences_in(session: RolloutSession, *, main_only: bool = False) -> Sequences:
    """Return the paths that are trained."""
    return sequences_of(session.forest, max_tokens=2 * session.model.max_model_len, main_only=main_only)


def session_metrics(session: RolloutSession, kept: Sequences) -> dict[str, float]:
    """Return what the log shows of the calls: how many, how they were attached and why, what is not trained."""
    counts = {**session.counts, **session.forest.counts}
    return {
        **{f"model_calls/{name}": float(count) for name, count in sorted(counts.items()) if count},
        "model_calls": float(session.num_calls),
        "num_roots": float(len(session.forest.roots)),
        "num_sequences": float(len(kept.paths)),
        "lost_share": kept.lost_share,
        "ignored_share": kept.ignored_share,
    }


def transcript(path: tuple[CallNode, ...]) -> list[Item]:
    """Return a path as output items: the model's, and what tools answered. Nobody else's text is the model's answer."""
    items: list[Item] = []
    open_calls: list[str] = []  # ids of the calls that no tool has answered yet
    for index, node in enumerate(path):
        for message in node.appended if index else ():
            if message.role == "tool":
                call_id = open_calls.pop(0) if open_calls else ""
                items.append(function_call_output_item(message.text, call_id=call_id))
        served = node.served
        if served.reasoning:
            items.append(reasoning_item([served.reasoning], index=index))
        if served.text or not (served.reasoning or served.calls):
            items.append(message_item(served.text, index=index))
        calls = zip(served.calls, served.ids, strict=True)
        items += [function_call_item(call.name, call.arguments, call_id=call_id) for call, call_id in calls]
        open_calls = list(served.ids)
    return items
