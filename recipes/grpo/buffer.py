"""The replay buffer: finished groups, earmarked for the step that will train on them.

A group's target is fixed when its prompt is drawn, and steps are taken in order, so a group can never be older than
`max_trajectory_age_steps` when it is trained on: the collector starts a group only once its target is that close.
The buffer still checks it. There is one lock; the train loop waits for rollouts only here.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from recipes.errors import StalledError
from recipes.tokens import GroupTokens
from recipes.types import Group, PromptRef, RolloutHeader, RolloutStatus

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

    def remove(self, groups: Sequence[Group]) -> None:
        """Drop groups that are stored; others change nothing."""
        keys = {group.prompt.key for group in groups}
        with self._changed:
            for target, stored in self._groups.items():
                self._groups[target] = [group for group in stored if group.prompt.key not in keys]

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

    def take(
        self,
        step: int,
        *,
        deadline_seconds: float,
        waiting_for: Callable[[], str],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[Group]:
        """Wait for the P groups of `step`, remove and return them, oldest prompt first.

        An empty list once closed or `is_stopped`, which is asked each second. Raises the collector's failure at once,
        and `StalledError` when no group arrives within the deadline.
        """
        with self._changed:
            last_progress, seen = time.monotonic(), -1
            while len(self._groups[step]) < self._num_prompts:
                if self._failure is not None:
                    raise self._failure
                if self._closed or is_stopped():
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


_HEADERS = "headers"  # of the groups, JSON in UTF-8


def write_groups(path: Path, groups: Sequence[Group], tokens: Sequence[GroupTokens]) -> None:
    """Write groups and their arrays to one safetensors file; an array is named by its group's number and its field."""
    # Reasons quote the model: json keeps half a surrogate pair, and a metric that is no number, as they are.
    headers = json.dumps([asdict(replace(group, tokens=None)) for group in groups])
    arrays = {_HEADERS: np.frombuffer(headers.encode(), np.uint8)}
    for number, one in enumerate(tokens):
        arrays |= {f"{number}.{field.name}": getattr(one, field.name) for field in fields(one)}
    path.write_bytes(save(arrays))


def read_groups(path: Path) -> tuple[tuple[Group, ...], tuple[GroupTokens, ...]]:
    """Return what `write_groups` wrote; the groups have no reference yet."""
    arrays = load_file(path)
    groups = tuple(_group(raw) for raw in json.loads(arrays[_HEADERS].tobytes()))
    names = [field.name for field in fields(GroupTokens)]
    found = ({name: arrays[f"{n}.{name}"] for name in names if f"{n}.{name}" in arrays} for n in range(len(groups)))
    tokens = (GroupTokens(**one) for one in found)
    return groups, tuple(tokens)


def _group(raw: dict[str, Any]) -> Group:
    rollouts = tuple(_header(header) for header in raw.pop("rollouts"))
    return Group(prompt=PromptRef(**raw.pop("prompt")), rollouts=rollouts, **raw)


def _header(raw: dict[str, Any]) -> RolloutHeader:
    typed = {
        "status": RolloutStatus(raw["status"]),
        "turns_by_flags": tuple(raw["turns_by_flags"]),
        "generated_by_flags": tuple(raw["generated_by_flags"]),
        "tokens_by_version": tuple((version, count) for version, count in raw["tokens_by_version"]),
        "tool_calls": tuple(raw.get("tool_calls", (0, 0))),  # not in older checkpoints
        "branches": tuple((tokens, sampled) for tokens, sampled in raw.get("branches", ())),
    }
    return RolloutHeader(**raw | typed)
