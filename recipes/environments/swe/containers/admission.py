"""How many containers run at once on this machine: of all processes of this user together.

A slot is a lock on a directory, which the kernel takes back from a process that is killed.

async with Admission(num_containers(limits)).reserve(seconds=600):
    container = await runtime.start("task.sif", limits)
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from recipes.environments.swe.contract import ContainerFailedError, ContainerLimits
from recipes.files import lock_directory

CONTAINERS_PER_CORE = 4  # an agent's container waits for the model most of the time
MEMORY_SHARE = 0.8  # of the memory of this machine or job that containers may fill
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MIB = 2**20
LOOK_SECONDS = 0.25  # between two looks for a free slot, by the one of a process that is next


def num_containers(limits: ContainerLimits) -> int:
    """Return how many containers this machine, or this job's share of it, holds at once by cores and memory."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such version, or no limit
            memory = min(memory, int(Path(path).read_text(encoding="utf-8")))
    by_memory = int(MEMORY_SHARE * memory) // (limits.memory_mib * MIB)
    return max(1, min(CONTAINERS_PER_CORE * cores, by_memory))


class Admission:
    """At most `num` containers at once on this machine, `own` of them of this process; who waits longest is next."""

    def __init__(self, num: int, *, own: int | None = None, directory: Path | None = None) -> None:
        """`directory` holds the slots; those of one directory are shared. Default: one per user."""
        if num < 1:
            raise ValueError(f"containers need at least one slot, got {num}")
        self.num = num
        self._own = asyncio.Semaphore(num if own is None else min(num, own))
        self._turn = asyncio.Lock()  # of the one that is next
        self._directory = directory or Path("/tmp", f"swe-places-{os.geteuid()}")

    @asynccontextmanager
    async def reserve(self, *, seconds: float) -> AsyncIterator[None]:
        """Hold a slot; raises `ContainerFailedError` when none is free within `seconds`."""
        has_seat, lock = False, -1
        try:
            try:
                async with asyncio.timeout(seconds):
                    has_seat = await self._own.acquire()
                    lock = await self._lock()
            except TimeoutError as error:
                wrong = f"none of the {self.num} slots for containers was free within {seconds:g} s"
                raise ContainerFailedError(wrong) from error
            yield
        finally:
            if lock >= 0:
                os.close(lock)
            if has_seat:
                self._own.release()

    async def _lock(self) -> int:
        async with self._turn:
            while (lock := self._free()) is None:
                await asyncio.sleep(LOOK_SECONDS)
            return lock

    def _free(self) -> int | None:
        """Return the lock of a free slot; None when all are taken."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            found = self._directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise ContainerFailedError(f"{self._directory} is no directory of this user; remove it")
            for number in range(self.num):
                path = self._directory / str(number)
                path.mkdir(mode=0o700, exist_ok=True)
                if (lock := lock_directory(path)) is not None:
                    return lock
        except OSError as error:
            raise ContainerFailedError(f"slots for containers cannot be made: {error}") from error
        return None
