"""How the engines, judges or rollout workers of a run come up: how many must, who is missing, and why.

A start that fails is counted with its reason and tried again. The run begins when enough members are up: at once where
no first start goes on, else those that are slow get as long again as these took. What comes up later takes part later.

`Starts` is written by whoever starts the members, on any thread, and one thread waits for it:

    waits for                         unblocked by
    enough members that are up        `succeeded`, `failed`, the deadline
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.errors import BringUpError, ConfigError, RecipeError, RunError

logger = logging.getLogger(__name__)

NUM_DEADLINES = 2  # the starts together may last this many times `deadlines.engine_start`: one may be late, not two
MIN_SHARE_KEY = "policy.generation.min_share_up"
_MAX_REASON = 400  # characters of one reason


@dataclass(slots=True)
class _Member:
    is_up: bool = False
    num_failed: int = 0  # starts in a row
    is_given_up: bool = False
    reason: str = "its first start has not ended"
    nodes: set[str] = field(default_factory=set)  # of the starts in a row that failed
    wrong: ConfigError | None = None  # that would fail every start

    @property
    def is_awaited(self) -> bool:
        """Whether its first start has not ended."""
        return not (self.is_up or self.num_failed or self.is_given_up)


class BackgroundLoop:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> None:
        """Cancel all its tasks, let them end, and stop it; wait for that no longer than `seconds`."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self.loop)
        self._thread.join(timeout=seconds)


class Starts:
    """The starts of members of one kind, such as all engines, which are known by their names."""

    def __init__(self, *groups: Sequence[str], max_starts: int, min_share: float) -> None:
        """A member is started `max_starts` times in a row at most; of each group the share `min_share` must be up."""
        self._groups = groups
        self._members = {name: _Member() for names in groups for name in names}
        self._max_starts, self._min_share = max_starts, min_share
        self._changed = threading.Condition()
        self._watchers: set[concurrent.futures.Future[None]] = set()  # kept: a loop holds its tasks weakly
        self.num_failed = 0  # starts, in the whole run

    def succeeded(self, name: str) -> None:
        """Note that a member is up."""
        with self._changed:
            self._members[name] = _Member(is_up=True)
            self._changed.notify_all()

    def lost(self, name: str, reason: object) -> None:
        """Note that a member that was up has failed, and is about to be started again."""
        with self._changed:
            self._members[name] = _Member(reason=str(reason), num_failed=0)
            self._changed.notify_all()

    def failed(
        self, name: str, reason: object, *, node: str = "", wrong: ConfigError | None = None, is_final: bool = False
    ) -> bool:
        """Count a start that has failed, on a node; return whether to try another.

        None is tried after a final one, nor where it failed for what is wrong in the configuration.
        """
        with self._changed:
            member = self._members[name]
            member.is_up = False
            member.num_failed += 1
            self.num_failed += 1
            where = f" on node {node}" if node else ""
            why = str(reason).removeprefix(f"{name}: ")
            member.reason = _cut(f"start {member.num_failed} of {self._max_starts} failed{where}: {why}")
            member.nodes |= {node} - {""}
            member.wrong = wrong
            member.is_given_up = is_final or wrong is not None or member.num_failed >= self._max_starts
            self._changed.notify_all()
        logger.warning("%s: %s", name, member.reason)
        if member.is_given_up:
            logger.error("%s stays away after %d failed starts", name, member.num_failed)
        return not member.is_given_up

    def watch(self, name: str, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        """Have a loop run what starts and watches a member; when that itself fails, the member stays away."""

        def ended(watcher: concurrent.futures.Future[None]) -> None:
            self._watchers.discard(watcher)
            if not watcher.cancelled() and (error := watcher.exception()) is not None:
                logger.error("%s is not watched any more", name, exc_info=error)
                self.failed(name, f"nobody watches it any more: {type(error).__name__}: {error}", is_final=True)

        watcher = asyncio.run_coroutine_threadsafe(work, loop)
        self._watchers.add(watcher)
        watcher.add_done_callback(ended)

    @property
    def are_all_away(self) -> bool:
        """Whether no member is up or will be."""
        with self._changed:
            return all(member.is_given_up for member in self._members.values())

    def missing(self) -> dict[str, str]:
        """Return why each member that is not up is missing."""
        with self._changed:
            return {name: member.reason for name, member in self._members.items() if not member.is_up}

    def wait(self, seconds: float) -> None:
        """Wait until the run can begin. When it cannot, raises `RunError`, which names everyone who is missing.

        Where they are missing since the configuration is wrong, the error is that `ConfigError`.
        """
        began = time.monotonic()
        enough_at: float | None = None  # since when enough are up
        with self._changed:
            while self._can_suffice():
                now = time.monotonic()
                if any(map(self._num_lacking, self._groups)):
                    enough_at = None
                elif enough_at is None:
                    enough_at = now
                if enough_at is not None and not any(member.is_awaited for member in self._members.values()):
                    break
                end = began + (seconds if enough_at is None else min(seconds, 2 * (enough_at - began)))
                if now >= end:
                    break
                self._changed.wait(end - now)
            lacking = [names for names in self._groups if self._num_lacking(names)]
        if lacking:
            raise self._too_few(lacking)
        for name, reason in self.missing().items():
            logger.warning("the run begins without %s: %s", name, reason)

    def _needed(self, names: Sequence[str]) -> int:
        return max(1, math.ceil(round(self._min_share * len(names), 6)))

    def _num_lacking(self, names: Sequence[str]) -> int:
        return max(0, self._needed(names) - sum(self._members[name].is_up for name in names))

    def _can_suffice(self) -> bool:
        """Whether those that are not given up are enough."""
        return all(
            len(names) - sum(self._members[name].is_given_up for name in names) >= self._needed(names)
            for names in self._groups
        )

    def _too_few(self, lacking: Sequence[Sequence[str]]) -> RecipeError:
        lines: list[str] = []
        nodes: set[str] = set()
        for names in lacking:
            missing = [name for name in names if not self._members[name].is_up]
            for name in missing:
                if (wrong := self._members[name].wrong) is not None:
                    return wrong
            lines.append(
                f"{len(names) - len(missing)} of {len(names)} are up, and {self._needed(names)} must be "
                f"({MIN_SHARE_KEY} {self._min_share:g}); missing:"
            )
            lines += [f"  {name}: {self._members[name].reason}" for name in missing]
            nodes = nodes.union(*(self._members[name].nodes for name in missing))
        if nodes and not any(self._fails_everywhere(names) for names in lacking):
            lines.append(f"  on {', '.join(f'node {node}' for node in sorted(nodes))}")
            return BringUpError("\n".join(lines))
        return RunError("\n".join(lines))

    def _fails_everywhere(self, names: Sequence[str]) -> bool:
        """Whether none of a group is up, so that its nodes are not to blame; of a single one, if nothing else is up."""
        others = names if len(names) > 1 else self._members
        return not any(self._members[name].is_up for name in others)


def wrong_input(error: BaseException) -> ConfigError | None:
    """Return what is wrong in the configuration, so that a start would fail everywhere and again; else None."""
    cause = getattr(error, "cause", None) or error
    return cause if isinstance(cause, ConfigError) else None


def _cut(text: str) -> str:
    """Return a reason in one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON else f"{line[: _MAX_REASON - 4]} ..."
