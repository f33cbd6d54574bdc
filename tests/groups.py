"""Groups for tests: rollouts in, headers out, with their arrays in a store that is this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from recipes.cluster.starts import Starts
from recipes.errors import TokensLostError
from recipes.rollouts.group import GroupRequest, GroupRunner, StoredGroup
from recipes.tokens import GroupTokens, pack_rollouts
from recipes.types import Group, PromptRef, Rollout


class LocalStore:
    """The reference is the arrays. What is in `lost` cannot be read any more."""

    def __init__(self) -> None:
        self.lost: list[GroupTokens] = []

    def put(self, tokens: GroupTokens) -> GroupTokens:
        return tokens

    def get(self, references: Sequence[GroupTokens]) -> list[GroupTokens]:
        if any(reference is lost for reference in references for lost in self.lost):
            raise TokensLostError("the tokens of a group cannot be read")
        return list(references)


class LocalWorkers:
    """One rollout worker that is this process."""

    num_lost = 0

    def __init__(self, groups: GroupRunner) -> None:
        self.groups = groups
        self.starts = Starts(["rollout worker 0"], max_starts=1, min_share=1.0)

    async def run_group(self, request: GroupRequest) -> StoredGroup:
        return pack_rollouts(await self.groups.run(request))

    def silent(self) -> dict[str, str]:
        return {}

    def close(self) -> None: ...


def group_of(rollouts: Sequence[Rollout], **values: Any) -> Group:
    """Return a finished group of these rollouts; `values` are its other fields, which have a default here."""
    headers, tokens = pack_rollouts(rollouts)
    defaults = {
        "prompt": PromptRef(epoch=0, row_index=0, prompt_id="ab" * 8),
        "agent": "a",
        "prompt_text": "",
        "target_step": 0,
        "version": 0,
    }
    return Group(**{**defaults, **values}, rollouts=headers, tokens=tokens)


def as_lists(tokens: GroupTokens) -> dict[str, Any]:
    """Return every array with its type and its values, to compare two groups' arrays."""
    arrays: dict[str, np.ndarray[Any, Any]] = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}
