"""Ray's object store as the place where the arrays of groups lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from recipes.errors import RunError, StalledError, TokensLostError
from recipes.tokens import GroupTokens

_GET_SECONDS = 600.0  # for all groups of a step to come from other nodes


class RayTokenStore:
    """Arrays are written to shared memory once. Readers on the node map them, other nodes fetch a copy."""

    def put(self, tokens: GroupTokens) -> Any:
        """Store a group's arrays; returns the reference, which keeps them as long as someone holds it.

        Raises `RunError` when there is no room.
        """
        try:
            return ray.put(tokens)
        except RayError as full:
            raise RunError(f"the object store takes no more groups, in memory or on its disk: {full}") from full

    def get(self, references: Sequence[Any]) -> list[GroupTokens]:
        """Return the arrays, read-only.

        Raises `StalledError` when they do not come, `TokensLostError` when some are lost.
        """
        what = f"the tokens of {len(references)} group{'s' if len(references) != 1 else ''}"
        try:
            groups: list[GroupTokens] = ray.get(list(references), timeout=_GET_SECONDS)
        except GetTimeoutError as late:
            raise StalledError(f"{what} did not come from the object store within {_GET_SECONDS:g} s") from late
        except RayError as lost:
            raise TokensLostError(f"{what} cannot be read from the object store: {lost}") from lost
        return groups
