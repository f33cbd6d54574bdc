"""A policy whose answers are written down beforehand, and a tool call as a model writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.environments.chat.codec import ChatCodec
from recipes.types import Completion, VersionSpan


def written_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in the notation of the recipe's models: texts as they are, all else as JSON."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@dataclass
class Scripted:
    """A policy that says one text per call."""

    codec: ChatCodec
    says: Sequence[str]
    calls: int = 0

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        ids = self.codec._tokenize(self.says[self.calls])
        self.calls += 1
        span = VersionSpan(version=0, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(span,), finish_reason="stop")
