"""The prompt of a call: the ids of the call that it continues, and what the chat template adds behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from recipes.environments.chat.codec import ChatCodec, PrefixError
from recipes.environments.model_server.forest import CallNode, Forest, Place
from recipes.environments.model_server.messages import ChatMessage
from recipes.environments.model_server.requests import ApiError
from recipes.token_ids import TokenIds

NOT_EXTENDABLE, STRIPPED = "template_not_extendable", "thinking_stripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Where a call belongs, and the ids of its prompt."""

    place: Place
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

    def build(self, place: Place, tools: Sequence[Mapping[str, Any]], *, compares: bool = False) -> Prompt:
        """Return the prompt of a request at its place; raises `ApiError` for messages that the template refuses."""
        if place.parent is None:
            return Prompt(place=place, seen_ids=TokenIds(), new_ids=self._whole(place.rest, tools))
        if not self.keeps_history:
            return self._as_rendered(place, place.parent, tools)
        try:
            new_ids = self._behind(place.parent, place.rest)
        except (PrefixError, TemplateError):
            root = Place(parent=None, rest=(*place.parent.messages(), *place.rest), reason=NOT_EXTENDABLE)
            return Prompt(place=root, seen_ids=TokenIds(), new_ids=self._whole(root.rest, tools))
        has_matched = None
        if compares:
            tail = self._suffix(place.parent.served, place.rest)
            whole = self._whole((*place.parent.messages(), *place.rest), tools)
            has_matched = whole[-len(tail) :] == tail
        return Prompt(place=place, seen_ids=self.forest.ids_of(place.parent), new_ids=new_ids, has_matched=has_matched)

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

    def _as_rendered(self, place: Place, parent: CallNode, tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Return the whole rendering, behind the deepest call on the path whose ids it begins with."""
        messages = (*parent.messages(), *place.rest)
        whole = self._whole(messages, tools)
        node: CallNode | None = parent
        while node is not None:
            seen = node.token_ids()
            if whole[: len(seen)] == seen:
                break
            node = node.parent
        if node is not parent:
            place = Place(parent=node, rest=messages[node.num_messages if node else 0 :], reason=STRIPPED)
        return Prompt(place=place, seen_ids=self.forest.ids_of(node), new_ids=whole[node.num_tokens if node else 0 :])


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
