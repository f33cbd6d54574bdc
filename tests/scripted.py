"""A policy whose answers are written down beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.environments.chat.codec import ChatCodec
from recipes.types import Completion, VersionSpan


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
