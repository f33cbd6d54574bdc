"""The calls of one rollout as a forest: a call is attached to the deepest earlier call whose messages it continues.

A node is one finished call. Its prompt is the ids of its parent's prompt and answer, followed by ids that the template
adds; a request that continues no earlier call starts a root. So each sampled token is in the forest once, and what was
sampled is never rendered again. Pure: no clock, no tokenizer, no engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from recipes.environments.model_server.messages import ChatMessage, difference, digests
from recipes.token_ids import TokenIds
from recipes.types import Turn


@dataclass(slots=True, kw_only=True, eq=False)
class CallNode:
    """One finished call."""

    number: int
    parent: CallNode | None
    appended: tuple[ChatMessage, ...]  # of the request, behind what the parent covers; not empty
    served: ChatMessage
    turn: Turn  # its prompt ids are those behind the parent's
    tools: bytes  # digest
    digest: bytes  # of all messages, the served one included
    reason: str = ""  # of a fork, or of a root after the first
    is_thinking_open: bool = False  # the answer was cut inside its reasoning
    is_delivered: bool = False  # the last byte of the answer was written on an open connection
    children: list[CallNode] = field(default_factory=list)
    num_messages: int = 0  # from the root on, its own included
    num_calls: int = 1  # from the root on, its own included
    num_tokens: int = 0  # from the root on, its own included

    @property
    def kind(self) -> str:
        """How it was attached: `root`, `extend` or `fork`."""
        if self.parent is None:
            return "root"
        return "extend" if self.parent.children[0] is self else "fork"

    def path(self) -> list[CallNode]:
        """Return the nodes from the root to this one."""
        nodes, node = [], self
        while node is not None:
            nodes.append(node)
            node = node.parent  # type: ignore[assignment]
        return nodes[::-1]

    def messages(self) -> list[ChatMessage]:
        """Return all messages from the root's first to this answer."""
        return [message for node in self.path() for message in (*node.appended, node.served)]

    def token_ids(self) -> tuple[int, ...]:
        """Return all ids from the root's prompt to the end of this answer."""
        return tuple(chain.from_iterable((*node.turn.prompt_token_ids, *node.turn.token_ids) for node in self.path()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request belongs."""

    parent: CallNode | None  # None: a new root
    rest: tuple[ChatMessage, ...]  # messages behind those of the parent; not empty
    reason: str  # the first difference from the calls before, should it become a fork or a further root


class Forest:
    """The finished calls of one rollout."""

    def __init__(self) -> None:
        self.nodes: list[CallNode] = []
        self.roots: list[CallNode] = []
        self.counts: Counter[str] = Counter()  # reasons of forks and of roots after the first
        self._by_digest: defaultdict[bytes, list[CallNode]] = defaultdict(list)
        self._latest: tuple[CallNode | None, TokenIds] = (None, TokenIds())  # the call that was added last, its ids

    def ids_of(self, node: CallNode | None) -> TokenIds:
        """Return `node.token_ids()`, at no cost for the call that was added last; nothing for None."""
        latest, ids = self._latest
        if node is None:
            return TokenIds()
        return ids if node is latest else TokenIds(node.token_ids())

    def attach(
        self, messages: Sequence[ChatMessage], tools: bytes, *, keeps_tools: bool = False, after: CallNode | None = None
    ) -> Place:
        """Return where a request belongs. Its last message is not the assistant's.

        `keeps_tools`: the tools are those of the earlier call, whatever the request says. `after`: the request names
        the call that it continues, and its messages are only those behind it.
        """
        given = tuple(messages)
        if after is not None:
            return Place(parent=after, rest=given, reason=self._reason_below(after, given))
        begins = digests(given[:-1])
        have_tools_changed = False
        for count in range(len(begins), 0, -1):
            found = [node for node in self._by_digest.get(begins[count - 1], ()) if node.num_messages == count]
            same_tools = [node for node in found if keeps_tools or node.tools == tools]
            have_tools_changed |= len(same_tools) < len(found)
            same = [node for node in same_tools if self._reasoning_agrees(node, given)]
            if same:
                parent = max(same, key=lambda node: (_is_named(node, given), node.number))
                rest = given[count:]
                return Place(parent=parent, rest=rest, reason=self._reason_below(parent, rest))
        reason = "tools_changed" if have_tools_changed else self._reason_below(None, given)
        return Place(parent=None, rest=given, reason=reason)

    def add(self, place: Place, *, served: ChatMessage, turn: Turn, tools: bytes, is_thinking_open: bool) -> CallNode:
        """Add a finished call and return its node."""
        parent = place.parent
        before = parent.digest if parent else b""
        node = CallNode(
            number=len(self.nodes),
            parent=parent,
            appended=place.rest,
            served=served,
            turn=turn,
            tools=tools,
            digest=digests([*place.rest, served], before)[-1],
            is_thinking_open=is_thinking_open,
            num_messages=(parent.num_messages if parent else 0) + len(place.rest) + 1,
            num_calls=(parent.num_calls if parent else 0) + 1,
            num_tokens=(parent.num_tokens if parent else 0) + len(turn.prompt_token_ids) + len(turn.token_ids),
        )
        siblings = parent.children if parent else self.roots
        if siblings:
            node.reason = place.reason or "sibling"
            self.counts[node.reason] += 1
        siblings.append(node)
        self.nodes.append(node)
        self._latest = (node, self.ids_of(parent).plus(turn.prompt_token_ids).plus(turn.token_ids))
        self._by_digest[node.digest].append(node)
        return node

    def _reasoning_agrees(self, node: CallNode, given: Sequence[ChatMessage]) -> bool:
        """Return whether the answers on a node's path came back with their reasoning, or without any.

        The digests have shown that all else is the same.
        """
        path: CallNode | None = node
        while path is not None:
            if given[path.num_messages - 1].reasoning.strip() not in ("", path.served.reasoning.strip()):
                return False
            path = path.parent
        return True

    def _reason_below(self, parent: CallNode | None, rest: Sequence[ChatMessage]) -> str:
        """Return the first difference between a request and the earlier calls that share most of it; "" without any."""
        nearest = (-1, False, "")  # place, whether it is the same question again, reason
        starts = parent.children if parent else self.roots
        pending = [(node, 0) for node in starts]
        while pending:
            node, start = pending.pop()
            at, reason = _first_difference((*node.appended, node.served), rest, start)
            if not reason and at < len(rest):
                pending += [(child, at) for child in node.children]
            reason = reason or "sibling"
            if (at, reason == "sibling") > nearest[:2]:
                nearest = (at, reason == "sibling", reason)
        return nearest[2]


def _is_named(node: CallNode, given: Sequence[ChatMessage]) -> bool:
    """Return whether a request names the calls of a node's answer by their ids."""
    return bool(node.served.ids) and node.served.ids == given[node.num_messages - 1].ids


def _first_difference(stored: Sequence[ChatMessage], given: Sequence[ChatMessage], start: int) -> tuple[int, str]:
    """Return the place in `given`, of which `stored` begins at `start`, where they first differ, and how.

    The reason is "" when all of `stored` is there.
    """
    for offset, message in enumerate(stored):
        at = start + offset
        if at == len(given):
            is_whole_request = offset == len(stored) - 1  # only the answer is missing: the same question again
            return at, "sibling" if is_whole_request else "history_shorter"
        reason = difference(message, given[at])
        if reason is not None:
            return at, reason
    return start + len(stored), ""


def walk(nodes: Sequence[CallNode]) -> Iterator[CallNode]:
    """Yield all nodes below and including `nodes`, parents first."""
    pending = list(reversed(nodes))
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)
