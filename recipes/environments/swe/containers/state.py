"""Whether a container runs, how it ended, and which process groups are whose in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from recipes.environments.swe.containers.waiting import settle
from recipes.environments.swe.containers.watchdog import Watched
from recipes.environments.swe.contract import ContainerEnd, ContainerEndedError


class ContainerState:
    """What a container and the programs in it share."""

    def __init__(self) -> None:
        self.watched: Watched | None = None  # once its first process is known
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # set when it has ended
        self.is_closed = False
        self.groups: set[int] = set()  # of the programs that were started by request

    @property
    def init(self) -> int:
        """Its first process."""
        assert self.watched is not None
        return self.watched.init

    def end(self) -> None:
        """Say that its first process has ended."""
        settle(self.over)

    def check(self) -> None:
        """Raise `ContainerEndedError` once it has ended or is being closed."""
        if self.is_closed:
            raise ContainerEndedError(ContainerEnd.DIED, "it was closed")
        if self.over.done():
            raise self.why_ended("")

    def why_ended(self, otherwise: str) -> ContainerEndedError:
        """Return the limit that it was killed for, also before `end` was called; without one say that it died."""
        if self.watched is None or self.watched.broken is None:
            return ContainerEndedError(ContainerEnd.DIED, otherwise)
        return ContainerEndedError(self.watched.broken, self.watched.detail)

    async def wait(self, awaited: Iterable[asyncio.Future[int]], seconds: float) -> bool:
        """Wait for one of some futures; False when none is there in time. Raises `ContainerEndedError`."""
        self.check()
        waiting: list[asyncio.Future[Any]] = [*awaited, self.over]
        done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self.check()
        return bool(done)

    def kill(self) -> None:
        """Kill all its processes; it is still to be closed."""
        if self.watched is not None:
            self.watched.kill()
