"""The replay buffer: finished groups, earmarked for the step that will train on them.

A group's target is fixed when its prompt is drawn, and steps are taken in order, so a group can never be older than
`max_trajectory_age_steps` when it is trained on: the collector starts a group only once its target is that close.
The buffer still checks it. There is one lock; the train loop waits for rollouts only here.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from recipes.errors import StalledError
from recipes.types import Group

# `take` looks again this often: a signal handler that calls `close` just before `take` begins to wait wakes nobody.
_LOOK_SECONDS = 1.0


class ReplayBuffer:
    """Groups by target step. `add` and `fail` are called by the collector, `take` by the train loop."""

    def __init__(self, *, num_prompts_per_step: int, max_trajectory_age_steps: int) -> None:
        self._num_prompts = num_prompts_per_step
        self._max_age = max_trajectory_age_steps
        self._groups: defaultdict[int, list[Group]] = defaultdict(list)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(len(groups) for groups in self._groups.values())

    def add(self, group: Group) -> None:
        """Store a finished group for its target step."""
        with self._changed:
            self._groups[group.target_step].append(group)
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Make every present and later `take` raise `failure`."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def close(self) -> None:
        """Wake a waiting `take`, which then returns no groups. Called at the end of the data or on a stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, step: int, *, deadline_seconds: float, waiting_for: Callable[[], str]) -> list[Group]:
        """Wait for the P groups of `step`, remove and return them, oldest prompt first; an empty list once closed.

        Raises the collector's failure at once, and `StalledError` when no group arrives within the deadline.
        """
        with self._changed:
            last_progress, seen = time.monotonic(), -1
            while len(self._groups[step]) < self._num_prompts:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    return []
                have = sum(len(groups) for groups in self._groups.values())
                if have != seen:
                    last_progress, seen = time.monotonic(), have
                left = last_progress + deadline_seconds - time.monotonic()
                if left <= 0:
                    raise StalledError(
                        f"step {step + 1}: {len(self._groups[step])} of {self._num_prompts} groups after "
                        f"{deadline_seconds:g} s without a new one (deadlines.progress); {waiting_for()}"
                    )
                self._changed.wait(min(left, _LOOK_SECONDS))
            groups = sorted(self._groups.pop(step), key=lambda group: (group.prompt.epoch, group.prompt.row_index))
        for group in groups:
            if step - group.version > self._max_age:
                raise RuntimeError(f"{group.prompt.key} was started at version {group.version}, too old for {step}")
        return groups

    def groups(self) -> list[Group]:
        """Return what is stored, for a checkpoint."""
        with self._changed:
            return [group for groups in self._groups.values() for group in groups]
