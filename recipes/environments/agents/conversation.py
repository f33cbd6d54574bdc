"""A conversation of several model calls, as agents with tools have it: what was said, as items and as ids.

Token in, token out: what was sampled in earlier turns is never rendered again (`chat/codec.py`). A prompt that does not
continue the ids seen so far ends the rollout without a reward, and so does an answer that cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from recipes.environments.agents.episode import Episode, make_turn, unusable
from recipes.environments.chat.codec import PrefixError, callable_tools, row_template_kwargs
from recipes.environments.chat.messages import chat_messages
from recipes.environments.contract.responses import Item, function_call_output_item
from recipes.token_ids import TokenIds
from recipes.types import PREFIX_BREAKS, RolloutStatus, Turn

CHECKED_TURNS = 16
MAX_ANSWERED = 1_000_000  # characters of all answers of a rollout, more than any context holds; the rest is cut off


class EndedError(Exception):
    """The rollout has no reward, for this reason."""

    def __init__(self, status: RolloutStatus, reason: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(reason)
        self.status, self.metrics = status, metrics or {}


@dataclass(slots=True)
class Conversation:
    """What has been said so far, beginning with the request `params`."""

    episode: Episode
    params: Mapping[str, Any]
    items: list[Item] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seen_ids: TokenIds = field(default_factory=TokenIds)
    text: str = ""  # of the last turn
    is_cut: bool = False  # whether the last turn was cut off, or the context has no room for another
    num_calls: int = 0
    num_answered: int = 0  # characters that tools have answered
    _num_before: int = 0  # items before those of the last turn
    _is_short: bool = True  # whether the new messages alone gave the ids that the whole conversation did

    async def next_turn(self) -> list[Item]:
        """Call the model once and return its function calls: none after a turn that was cut off.

        Raises `EndedError`, and what the model client raises.
        """
        codec, tools = self.episode.codec, callable_tools(self.params)
        new_ids = self._new_ids()
        prompt_ids = self.seen_ids.plus(new_ids)
        completion = await self.episode.model.generate(prompt_ids, max_tokens=self.episode.max_tokens)
        if self.turns and completion.finish_reason == "length" and not completion.token_ids:
            self.is_cut = True  # the context is full; the turns so far count
            return []
        if problem := unusable(completion, num_prompt_tokens=len(prompt_ids)):
            raise EndedError(RolloutStatus.ABORTED, problem)
        decoded = codec.decode(completion.token_ids, prompt_ids=new_ids, tools=tools, num_calls=self.num_calls)
        self.seen_ids = prompt_ids.plus(completion.token_ids)
        self.turns.append(make_turn(new_ids, completion, decoded, self.episode.patterns))
        self._num_before = len(self.items)
        self.items.extend(decoded.items)
        self.text = decoded.text
        calls = [item for item in decoded.items if item["type"] == "function_call"]
        self.num_calls += len(calls)
        self.is_cut = completion.finish_reason == "length"
        return [] if self.is_cut else calls

    def add_answer(self, text: str, *, call_id: str) -> None:
        """Add a tool's answer, or what MAX_ANSWERED leaves of it."""
        self.items.append(function_call_output_item(self._kept(text), call_id=call_id))

    def add_message(self, text: str) -> None:
        """Add a message of the user, or what MAX_ANSWERED leaves of it."""
        self.items.append({"role": "user", "content": self._kept(text)})

    def _short_ids(self) -> tuple[int, ...] | None:
        """Return the ids of what follows the last turn, rendered without what came before; None where that fails."""
        answer, *messages = chat_messages({"input": self.items[self._num_before :]})
        try:
            ids = self.episode.codec.suffix(answer, messages, row_template_kwargs(self.params))
        except (PrefixError, TemplateError):  # a template may refuse the short conversation, such as its system message
            return None
        has_ended = self.seen_ids[-1:] == (self.episode.codec.eos_token_id,)
        return ids[1:] if has_ended and ids[:1] == self.seen_ids[-1:] else ids

    def _kept(self, text: str) -> str:
        kept = text[: max(MAX_ANSWERED - self.num_answered, 0)]
        self.num_answered += len(kept)
        return kept

    def _new_ids(self) -> tuple[int, ...]:
        """Return the ids that are new in the prompt of the next turn.

        Rendering all turns each time would take seconds in a long rollout. So where the template gives the same ids for
        the new messages alone, only these are rendered. The whole is looked at again after the first turn,
        CHECKED_TURNS turns later, and whenever the rollout is twice as long as then.
        """
        codec = self.episode.codec
        if not self.turns:
            return codec.encode(self.params)
        short = self._short_ids() if self._is_short else None
        parts, rest = divmod(len(self.turns) - 1, CHECKED_TURNS)
        is_checked = rest == 0 and parts & (parts - 1) == 0  # after 0, 1, 2, 4, ... times as many turns
        if short is not None and not is_checked:
            return short
        try:
            whole = codec.extend(self.seen_ids[:], self.params, self.items)
            self._is_short = whole == short
            return whole
        except PrefixError as error:
            reason = f"prefix break before turn {len(self.turns) + 1}: {error}"
            raise EndedError(RolloutStatus.ABORTED, reason, {PREFIX_BREAKS: 1.0}) from error
