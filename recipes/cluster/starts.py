"""How the engines, judges or rollout workers of a run come up: how many must, who is missing, and why.

A start that fails is counted with its reason and tried again. The run begins when every first start has ended and
enough members are up. Those that are slow then get as long again as these took; what comes up later takes part later.

`Starts` is written by whoever starts the members, on any thread, and one thread waits for it:

    waits for                         unblocked by
    enough members that are up        `succeeded`, `failed`, the deadline
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.errors import BringUpError, ConfigError, RunError

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
    node: str = ""  # of the start that failed last

    @property
    def is_awaited(self) -> bool:
        """Whether its first start has not ended."""
        return not (self.is_up or self.num_failed or self.is_given_up)


class Starts:
    """The starts of members of one kind, such as all engines, which are known by their names."""

    def __init__(self, *groups: Sequence[str], max_starts: int, min_share: float) -> None:
        """A member is started `max_starts` times in a row at most; of each group the share `min_share` must be up."""
        self._groups = groups
        self._members = {name: _Member() for names in groups for name in names}
        self._max_starts, self._min_share = max_starts, min_share
        self._changed = threading.Condition()
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

    def failed(self, name: str, reason: object, *, node: str = "", is_final: bool = False) -> bool:
        """Count a start that has failed, on a node; return whether to try another. After a final one, none is tried."""
        with self._changed:
            member = self._members[name]
            member.num_failed += 1
            self.num_failed += 1
            where = f" on node {node}" if node else ""
            why = str(reason).removeprefix(f"{name}: ")
            member.reason = _cut(f"start {member.num_failed} of {self._max_starts} failed{where}: {why}")
            member.node = node
            member.is_given_up = is_final or member.num_failed >= self._max_starts
            self._changed.notify_all()
        logger.warning("%s: %s", name, member.reason)
        if member.is_given_up:
            logger.error("%s stays away after %d failed starts", name, member.num_failed)
        return not member.is_given_up

    def missing(self) -> dict[str, str]:
        """Return why each member that is not up is missing."""
        with self._changed:
            return {name: member.reason for name, member in self._members.items() if not member.is_up}

    def wait(self, seconds: float) -> None:
        """Wait until the run can begin; raises `RunError`, which names everyone who is missing, when it cannot."""
        began = time.monotonic()
        end = began + seconds
        is_enough = False
        with self._changed:
            while (now := time.monotonic()) < end and self._can_suffice():
                if not is_enough and not any(map(self._num_lacking, self._groups)):
                    is_enough, end = True, min(end, now + (now - began))
                if is_enough and not any(member.is_awaited for member in self._members.values()):
                    break
                self._changed.wait(max(0.0, end - time.monotonic()))
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

    def _too_few(self, lacking: Sequence[Sequence[str]]) -> RunError:
        lines: list[str] = []
        nodes: set[str] = set()
        for names in lacking:
            missing = [name for name in names if not self._members[name].is_up]
            lines.append(
                f"{len(names) - len(missing)} of {len(names)} are up, and {self._needed(names)} must be "
                f"({MIN_SHARE_KEY} {self._min_share:g}); missing:"
            )
            lines += [f"  {name}: {self._members[name].reason}" for name in missing]
            nodes |= {self._members[name].node for name in missing}
        if nodes - {""} and any(member.is_up for member in self._members.values()):
            lines.append(f"  on {', '.join(f'node {node}' for node in sorted(nodes - {''}))}")
            return BringUpError("\n".join(lines))
        return RunError("\n".join(lines))


def wrong_input(error: BaseException) -> bool:
    """Whether a start has failed for what is wrong in the configuration, and so would fail everywhere and again."""
    return isinstance(getattr(error, "cause", None) or error, ConfigError)


def _cut(text: str) -> str:
    """Return a reason in one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON else f"{line[: _MAX_REASON - 4]} ..."
