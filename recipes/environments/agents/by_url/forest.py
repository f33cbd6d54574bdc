"""The calls of one rollout as a forest: a call is attached to the deepest earlier call whose messages it continues.

A node is one finished call. Its prompt is the ids of its parent's prompt and answer, followed by ids that the template
adds; a request that continues no earlier call starts a root. So each sampled token is in the forest once, and what was
sampled is never rendered again. Pure: no clock, no tokenizer, no engine.

The prompt of a call: the ids of the call that it continues, and what the chat template adds behind them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jinja2 import TemplateError

from recipes.environments.agents.by_url.messages import ApiError, ChatMessage, difference, digests
from recipes.environments.chat.codec import ChatCodec, PrefixError
from recipes.token_ids import TokenIds
from recipes.types import Turn

NOT_EXTENDABLE, STRIPPED = "template_not_extendable", "thinking_stripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Where a call belongs, and the ids of its prompt."""

    attachment: Attachment
    seen_ids: TokenIds  # of the call that it continues
    new_ids: tuple[int, ...]
    has_matched: bool | None = None  # whether a whole rendering ends in the same ids; None: not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Renders the prompts of one rollout."""

    forest: Forest
    codec: ChatCodec
    template_kwargs: Mapping[str, Any]
    keeps_history: bool = True
    """Stored ids stay in a prompt although the template would show that part in another way, as templates do that drop
    old reasoning. False: such a request forks, so that the model sees what serving would show it."""

    def build(self, attachment: Attachment, tools: Sequence[Mapping[str, Any]], *, compares: bool = False) -> Prompt:
        """Return the prompt of a request; raises `ApiError` for messages that the template refuses."""
        if attachment.parent is None:
            return Prompt(attachment=attachment, seen_ids=TokenIds(), new_ids=self._whole(attachment.rest, tools))
        if not self.keeps_history:
            return self._as_rendered(attachment, attachment.parent, tools)
        try:
            new_ids = self._behind(attachment.parent, attachment.rest)
        except (PrefixError, TemplateError):
            root = Attachment(
                parent=None, rest=(*attachment.parent.messages(), *attachment.rest), reason=NOT_EXTENDABLE
            )
            return Prompt(attachment=root, seen_ids=TokenIds(), new_ids=self._whole(root.rest, tools))
        has_matched = None
        if compares:
            tail = self._suffix(attachment.parent.served, attachment.rest)
            whole = self._whole((*attachment.parent.messages(), *attachment.rest), tools)
            has_matched = whole[-len(tail) :] == tail
        return Prompt(
            attachment=attachment,
            seen_ids=self.forest.ids_of(attachment.parent),
            new_ids=new_ids,
            has_matched=has_matched,
        )

    def _behind(self, parent: CallNode, rest: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the ids between a call's answer and the next one: what ends the answer, then the new messages."""
        sampled = parent.turn.token_ids
        suffix = self._suffix(parent.served, rest)
        if sampled and sampled[-1] == self.codec.eos_token_id:
            return suffix[1:]
        return self.codec.closing(sampled, is_thinking_open=parent.is_thinking_open) + suffix

    def _suffix(self, served: ChatMessage, rest: Sequence[ChatMessage]) -> tuple[int, ...]:
        messages = [message.for_template() for message in rest]
        return self.codec.suffix(served.for_template(), messages, self.template_kwargs)

    def _whole(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        try:
            return self.codec.encode_chat([m.for_template() for m in messages], tools, self.template_kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(400, f"field 'messages': the chat template refuses them: {error}") from error

    def _as_rendered(self, attachment: Attachment, parent: CallNode, tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Return the whole rendering, behind the deepest call on the path whose ids it begins with."""
        messages = (*parent.messages(), *attachment.rest)
        whole = self._whole(messages, tools)
        node: CallNode | None = parent
        while node is not None:
            seen = node.token_ids()
            if whole[: len(seen)] == seen:
                break
            node = node.parent
        if node is not parent:
            attachment = Attachment(parent=node, rest=messages[node.num_messages if node else 0 :], reason=STRIPPED)
        return Prompt(
            attachment=attachment, seen_ids=self.forest.ids_of(node), new_ids=whole[node.num_tokens if node else 0 :]
        )


def cut_at_stop(codec: ChatCodec, token_ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """Return how many tokens there are up to and including the first stop string; None when none of them occurs."""
    if not stops or not any(stop in codec.text(token_ids) for stop in stops):
        return None
    low, high = 1, len(token_ids)  # the shortest beginning that holds one
    while low < high:
        middle = (low + high) // 2
        if any(stop in codec.text(token_ids[:middle]) for stop in stops):
            high = middle
        else:
            low = middle + 1
    return low


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop string in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


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
class Attachment:
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
    ) -> Attachment:
        """Return where a request belongs. Its last message is not the assistant's.

        `keeps_tools`: the tools are those of the earlier call, whatever the request says. `after`: the request names
        the call that it continues, and its messages are only those behind it.
        """
        given = tuple(messages)
        if after is not None:
            return Attachment(parent=after, rest=given, reason=self._reason_below(after, given))
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
                return Attachment(parent=parent, rest=rest, reason=self._reason_below(parent, rest))
        reason = "tools_changed" if have_tools_changed else self._reason_below(None, given)
        return Attachment(parent=None, rest=given, reason=reason)

    def add(
        self, attachment: Attachment, *, served: ChatMessage, turn: Turn, tools: bytes, is_thinking_open: bool
    ) -> CallNode:
        """Add a finished call and return its node."""
        parent = attachment.parent
        before = parent.digest if parent else b""
        node = CallNode(
            number=len(self.nodes),
            parent=parent,
            appended=attachment.rest,
            served=served,
            turn=turn,
            tools=tools,
            digest=digests([*attachment.rest, served], before)[-1],
            is_thinking_open=is_thinking_open,
            num_messages=(parent.num_messages if parent else 0) + len(attachment.rest) + 1,
            num_calls=(parent.num_calls if parent else 0) + 1,
            num_tokens=(parent.num_tokens if parent else 0) + len(turn.prompt_token_ids) + len(turn.token_ids),
        )
        siblings = parent.children if parent else self.roots
        if siblings:
            node.reason = attachment.reason or "sibling"
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
