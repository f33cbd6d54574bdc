"""An agent by its URL: a program of somebody else, which gets a row and samples from its rollout's own model server.

    POST <url>/run    the row, with model_server: {base_url: ".../r/SECRET/v1", model: "policy"}
    200               a JSON object, once the agent is done; what it adds to the row goes to the verifier

The verifier scores the main path of the calls that the agent made: the one with the most calls. All paths are trained
with its reward, each call once. What the bounds on a rollout's sequences leave out is `lost_share`, a share of the
sampled tokens, and a rollout that lost more than half of them is kept out of the loss. With the setting `train: main`
only the main path is trained, and what is beside it is `ignored_share`, which keeps nothing out of the loss. A rollout
has no reward when the agent failed, was late, or made no call, and when the engine gave no answer to its last call: an
agent may go on without it, and report what it has.

From a forest of calls to what is trained: paths from a root to a leaf, each call trained in one of them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from recipes.cluster.ports import AGENT_PORTS, address_of, family_of, hold_in_range
from recipes.environments.agents.by_url.forest import CallNode, Forest, walk
from recipes.environments.agents.by_url.messages import REASONS
from recipes.environments.agents.by_url.server import ListeningServer
from recipes.environments.agents.by_url.session import MAX_CALLS, MODEL, RolloutSession, SessionLimits
from recipes.environments.agents.coding.outcome import error_kind
from recipes.environments.agents.conversation import Episode, awaiting_group, scored, unscored
from recipes.environments.chat.codec import row_template_kwargs
from recipes.environments.contract.http import JsonClient, RefusedError
from recipes.environments.contract.verifier import (
    Agent,
    Item,
    NoVerdict,
    Pending,
    function_call_item,
    function_call_output_item,
    message_item,
    reasoning_item,
    response_object,
)
from recipes.retry import NoReplyError, RetryPolicy, TransientError, reply_within
from recipes.types import Rollout, RolloutStatus, Turn

MAX_SEQUENCES = 8  # of one rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The paths of a rollout that are kept."""

    paths: tuple[tuple[CallNode, ...], ...]  # from a root to a leaf, the main one first
    trained: tuple[frozenset[int], ...]  # per path: numbers of the nodes that are trained there
    num_delivered: int  # sampled tokens of all calls that count
    num_trained: int  # sampled tokens of all calls that are trained
    num_ignored: int = 0  # sampled tokens of the calls beside the main path, where only that counts
    lost: Mapping[str, int] = field(default_factory=dict)  # sampled tokens in no kept path, by why they are apart

    @property
    def lost_share(self) -> float:
        """The share of sampled tokens that are in no kept path."""
        return 1 - self.num_trained / self.num_delivered if self.num_delivered else 0.0

    @property
    def ignored_share(self) -> float:
        """The share of all sampled tokens that do not count."""
        return self.num_ignored / (self.num_delivered + self.num_ignored) if self.num_ignored else 0.0

    def turns(self, index: int) -> tuple[Turn, ...]:
        """Return one path as turns: what is not trained there is context, and belongs to the next turn's prompt."""
        turns: list[Turn] = []
        context: tuple[int, ...] = ()
        routes = b""  # of the context
        for node in self.paths[index]:
            prompt_ids, routes = context + node.turn.prompt_token_ids, routes + node.turn.routes
            if node.number in self.trained[index]:
                turns.append(replace(node.turn, prompt_token_ids=prompt_ids, routes=routes))
                context, routes = (), b""
            else:
                context = prompt_ids + node.turn.token_ids
        return tuple(turns)

    def branches(self) -> tuple[tuple[Turn, ...], ...]:
        """Return the turns of every path but the main one."""
        return tuple(self.turns(index) for index in range(1, len(self.paths)))


def kept_nodes(forest: Forest) -> list[CallNode]:
    """Return the calls that somebody acted on: delivered, or continued by such a call. Parents come first."""
    kept: set[int] = set()
    for node in reversed(list(walk(forest.roots))):
        if node.is_delivered or any(child.number in kept for child in node.children):
            kept.add(node.number)
    return [node for node in walk(forest.roots) if node.number in kept]


def sequences_of(
    forest: Forest, *, max_tokens: int, max_sequences: int = MAX_SEQUENCES, main_only: bool = False
) -> Sequences:
    """Return the paths to train on, at most `max_tokens` tokens of them together.

    The main path has the most calls, the latest one of equals. The others follow by how many sampled tokens they add.
    With `main_only` they do not count.
    """
    nodes = kept_nodes(forest)
    numbers = {node.number for node in nodes}
    leaves = [node for node in nodes if not any(child.number in numbers for child in node.children)]
    num_sampled = _num_sampled(nodes)
    if main_only and leaves:
        leaves = [_best_leaf(leaves, {}, is_main=True)]
        nodes = list(leaves[0].path())
    covered: set[int] = set()
    paths: list[tuple[CallNode, ...]] = []
    trained: list[frozenset[int]] = []
    room = max_tokens
    while leaves and len(paths) < max_sequences:
        leaf = _best_leaf(leaves, _new_tokens(nodes, covered), is_main=not paths)
        leaves.remove(leaf)
        if leaf.num_tokens > room:
            continue
        room -= leaf.num_tokens
        path = tuple(leaf.path())
        new = frozenset(node.number for node in path) - covered
        covered |= new
        paths.append(path)
        trained.append(new)
    return Sequences(
        paths=tuple(paths),
        trained=tuple(trained),
        num_delivered=_num_sampled(nodes),
        num_trained=_num_sampled([node for node in nodes if node.number in covered]),
        num_ignored=num_sampled - _num_sampled(nodes),
        lost=_lost(nodes, covered),
    )


def _lost(nodes: Sequence[CallNode], covered: set[int]) -> dict[str, int]:
    """Return the sampled tokens of the calls that are not covered, by the reason of the fork or root they are below.

    Parents come first. The first root shares the reason of the next one, which left it; one path alone is too long.
    """
    first = next((node.reason for node in nodes if node.reason), "too_long")
    reasons: dict[int, str] = {}
    lost: Counter[str] = Counter()
    for node in nodes:
        reasons[node.number] = node.reason or (reasons.get(node.parent.number, first) if node.parent else first)
        if node.number not in covered:
            lost[reasons[node.number]] += len(node.turn.token_ids)
    return dict(lost)


def _num_sampled(nodes: Sequence[CallNode]) -> int:
    return sum(len(node.turn.token_ids) for node in nodes)


def _best_leaf(leaves: Sequence[CallNode], new_tokens: dict[int, int], *, is_main: bool) -> CallNode:
    if is_main:
        return max(leaves, key=lambda leaf: (leaf.num_calls, leaf.number))
    return max(leaves, key=lambda leaf: (new_tokens[leaf.number], leaf.number))


def _new_tokens(nodes: Sequence[CallNode], covered: set[int]) -> dict[int, int]:
    """Return, per node, the sampled tokens from its root to it that no path covers yet."""
    totals: dict[int, int] = {}
    for node in nodes:
        above = totals[node.parent.number] if node.parent else 0
        totals[node.number] = above + (0 if node.number in covered else len(node.turn.token_ids))
    return totals


logger = logging.getLogger(__name__)

MAX_LOST = 0.5  # of the sampled tokens; a rollout that loses more is kept out of the loss
_warned_of: set[str] = set()  # reasons why tokens were lost that this process has logged
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
        end = await self._end(episode, agent, session)
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

    async def _end(self, episode: Episode, agent: Agent, session: RolloutSession) -> Mapping[str, Any] | NoVerdict:
        """Return what the agent adds to its row, or why its work gets no verdict."""
        try:
            server = await self.server_for(urlsplit(agent.url).hostname or "")
        except OSError as error:  # no look-up of its name, or no way to it
            return NoVerdict(status=RolloutStatus.ENV_FAILED, reason=f"agent {agent.url}: {error}")
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
    address = address_of(host)
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
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
    """Return the paths that are trained, and log what is lost: once for each reason, as agents repeat themselves."""
    kept = sequences_of(session.forest, max_tokens=2 * session.model.max_model_len, main_only=main_only)
    for reason in sorted(kept.lost.keys() - _warned_of):
        _warned_of.add(reason)
        why = f"{reason}: {REASONS.get(reason, 'one conversation is longer than twice the context')}"
        lost = f"{kept.lost[reason]} of {kept.num_delivered} sampled tokens of an agent's rollout are not trained"
        logger.warning("%s (%s); `make agent-check` shows its calls", lost, why)
    return kept


def session_metrics(session: RolloutSession, kept: Sequences) -> dict[str, float]:
    """Return what the log shows of the calls: how many, how they were attached and why, what is not trained."""
    counts = {**session.counts, **session.forest.counts}
    return {
        **{f"model_calls/{name}": float(count) for name, count in sorted(counts.items()) if count},
        "model_calls": float(session.num_calls),
        "num_roots": float(len(session.forest.roots)),
        "num_sequences": float(len(kept.paths)),
        "lost_share": kept.lost_share,
        **{f"lost_tokens/{reason}": float(count) for reason, count in sorted(kept.lost.items())},
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
