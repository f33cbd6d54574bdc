"""One engine as the driver sees it: the actor that runs it now, and the totals of all actors that have run it.

`outcomes` waits for calls to several engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from recipes.errors import EngineError
from recipes.generation.clients.failure import failure
from recipes.generation.engine import EngineInfo
from recipes.generation.serving.stream import EngineAddress

COUNTERS = (  # these only grow
    "busy_seconds",
    "update_seconds",
    "requests",
    "prompt_tokens",
    "cached_prompt_tokens",
    "generated_tokens",
)
GAUGES = ("running", "waiting")  # requests, at the moment


class EngineHandle:
    """An engine keeps its number; its actor is replaced when it dies."""

    def __init__(self, index: int, make_actor: Callable[[int], Any]) -> None:
        self.index = index
        self.info: EngineInfo | None = None
        self.num_starts = 0
        self.is_up = False  # from the end of a start until a failure
        self.can_see_file = True  # whether it is on the host of the policy's shared-memory file
        self._make_actor = make_actor
        self._past: dict[str, float] = {}  # totals of earlier actors
        self._latest: Mapping[str, float] = {}  # of the present one, when it was last asked

    def __str__(self) -> str:
        return str(self.info) if self.info else f"generation engine {self.index}"

    @property
    def key(self) -> tuple[int, int]:
        """Engine and actor: another actor of the same engine has another key."""
        return self.index, self.num_starts

    @property
    def address(self) -> EngineAddress:
        """Where the actor that was started last takes requests."""
        assert self.info is not None, "the engine has not been started"
        return self.info.address

    def launch(self) -> Any:
        """Create a new actor and return the reference of its `EngineInfo`."""
        self.actor = self._make_actor(self.index)
        self.num_starts += 1
        self._past, self._latest = self.totals(None), {}
        return self.actor.start.remote()

    def started(self, info: EngineInfo) -> None:
        """Note that the actor can generate."""
        self.info, self.is_up = info, True

    def kill(self) -> None:
        """End the actor and its EngineCore process."""
        self.is_up = False
        ray.kill(self.actor)

    def totals(self, latest: Mapping[str, float] | None) -> dict[str, float]:
        """Return the statistics over all actors, `latest` being those of the present one; None: it did not answer."""
        if latest is not None:
            self._latest = latest
        totals = {name: self._past.get(name, 0.0) + self._latest.get(name, 0.0) for name in COUNTERS}
        return totals | {name: (latest or {}).get(name, 0.0) for name in GAUGES}


def outcomes(
    calls: Mapping[EngineHandle, Any], deadline_seconds: float, *, stop_at_failure: bool = False
) -> dict[EngineHandle, Any]:
    """Wait for one call per engine; return the result or the `EngineError` of each, failures first.

    With `stop_at_failure` the first failure ends the wait, and calls that are not finished then have no entry.
    """
    end = time.monotonic() + deadline_seconds
    engines = {call: engine for engine, call in calls.items()}
    waiting = list(engines)
    results: dict[EngineHandle, Any] = {}
    errors: dict[EngineHandle, EngineError] = {}
    while waiting and not (errors and stop_at_failure):
        done, waiting = ray.wait(waiting, timeout=max(end - time.monotonic(), 0.0))
        for call in done or waiting:  # none is done: all that are left are late
            try:
                results[engines[call]] = ray.get(call, timeout=0)
            except Exception as error:
                errors[engines[call]] = failure(str(engines[call]), error, deadline_seconds)
        if not done:
            break
    return errors | results
