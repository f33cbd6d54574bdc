"""Ray's object store as the place where the arrays of groups lie, and what is said when it is full.

Ray keeps objects in shared memory, and in files below /tmp where that is full. It refuses one when the disk is, too.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError

from recipes.errors import Problem, RunError, StalledError, TokensLostError
from recipes.tokens import GroupTokens

_GET_SECONDS = 600.0  # for all groups of a step to come from other nodes


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Raise `RunError` with what to do when the block, or a task that it asks, finds Ray's object store full."""
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as full:
        problem = Problem(
            where=f"Ray's object store on {getattr(full, 'ip', '') or socket.gethostname()}",
            wrong=f"no room for {what}: it is full in memory, and so is the disk of /tmp, where it goes on",
            fix="make room in /tmp of that node; or raise RAY_local_fs_capacity_threshold, the share of that disk that "
            "may be in use (0.95); or lower grpo.num_prompts_per_step or grpo.async_grpo.max_trajectory_age_steps",
        )
        raise RunError(str(problem)) from full


class RayTokenStore:
    """Arrays are written to shared memory once. Readers on the node map them, other nodes fetch a copy."""

    def put(self, tokens: GroupTokens) -> Any:
        """Store a group's arrays; returns the reference, which keeps them as long as someone holds it.

        Raises `RunError` when there is no room.
        """
        with room_for("the tokens of a group"):
            return ray.put(tokens)

    def get(self, references: Sequence[Any]) -> list[GroupTokens]:
        """Return the arrays, read-only.

        Raises `StalledError` when they do not come, `TokensLostError` when some are lost, and `RunError` when there is
        no room for a copy of those of another node: they are not lost.
        """
        what = f"the tokens of {len(references)} group{'s' if len(references) != 1 else ''}"
        try:
            with room_for(what):
                groups: list[GroupTokens] = ray.get(list(references), timeout=_GET_SECONDS)
        except GetTimeoutError as late:
            raise StalledError(f"{what} did not come from the object store within {_GET_SECONDS:g} s") from late
        except RayError as lost:
            raise TokensLostError(f"{what} cannot be read from the object store: {lost}") from lost
        return groups
