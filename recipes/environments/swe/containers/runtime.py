"""Which program runs containers on this machine, and how many of them it has room for.

runtime = runtime_of_machine()
async with Admission(num_places(limits)).place(seconds=600):
    container = await runtime.start("task.sif", limits)
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from recipes.environments.swe.containers import apptainer, bwrap, podman
from recipes.environments.swe.contract import ContainerFailedError, ContainerLimits, Runtime
from recipes.errors import LaunchError, Problem

CONTAINERS_PER_CORE = 4  # an agent's container waits for the model most of the time
MEMORY_SHARE = 0.8  # of the memory of this machine or job that containers may fill
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MIB = 2**20
# Bubblewrap before Podman: both run the same images, and Podman takes a second more to start one.
RUNTIMES: Mapping[str, tuple[Mapping[str, str], Callable[[], Runtime]]] = {
    "apptainer": (apptainer.PROGRAMS, apptainer.ApptainerRuntime),
    "bwrap": (bwrap.PROGRAMS, bwrap.BwrapRuntime),
    "podman": (podman.PROGRAMS, podman.PodmanRuntime),
}


def runtime_of_machine() -> Runtime:
    """Return the first of `RUNTIMES` whose programs are installed; raises `LaunchError` with what each lacks."""
    lacking: list[str] = []
    for name, (programs, make) in RUNTIMES.items():
        if not (missing := missing_programs(programs)):
            return make()
        lacking.append(f"{name} needs {', '.join(missing)}")
    packages = " ".join(sorted({bwrap.PROGRAMS[program] for program in missing_programs(bwrap.PROGRAMS)}))
    raise LaunchError(
        Problem(
            where="containers of tasks",
            wrong=f"no program on this machine can run them ({'; '.join(lacking)})",
            fix=f"install apptainer, or `apt-get install {packages}`",
        )
    )


def missing_programs(programs: Mapping[str, str]) -> list[str]:
    """Return those of the programs that are not installed."""
    return [program for program in programs if shutil.which(program) is None]


def num_places(limits: ContainerLimits) -> int:
    """Return how many containers this machine, or this job's share of it, holds at once by cores and memory."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such version, or no limit
            memory = min(memory, int(Path(path).read_text()))
    by_memory = int(MEMORY_SHARE * memory) // (limits.memory_mib * MIB)
    return max(1, min(CONTAINERS_PER_CORE * cores, by_memory))


class Admission:
    """At most `num` containers at once in this process; who waits longest is next."""

    def __init__(self, num: int) -> None:
        if num < 1:
            raise ValueError(f"containers need at least one place, got {num}")
        self.num = num
        self._places = asyncio.Semaphore(num)

    @asynccontextmanager
    async def place(self, *, seconds: float) -> AsyncIterator[None]:
        """Hold a place; raises `ContainerFailedError` when none is free within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._places.acquire()
        except TimeoutError as error:
            raise ContainerFailedError(f"none of the {self.num} places was free within {seconds:g} s") from error
        try:
            yield
        finally:
            self._places.release()
