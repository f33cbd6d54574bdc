"""A task's image and its containers, with which tests of containers work."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from small_root import require
from speed import patiently
from swe_image import write_sif, write_task_root

from recipes.environments.swe.containers.container import RunningContainer
from recipes.environments.swe.containers.places import PREFIX, home
from recipes.environments.swe.containers.runtime import BWRAP_PROGRAMS as PROGRAMS
from recipes.environments.swe.containers.runtime import RUNTIMES
from recipes.environments.swe.containers.shell import BashShell
from recipes.environments.swe.contract import (
    CommandResult,
    ContainerLimits,
    Runtime,
)

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "recipes/environments/swe/containers"
LIMITS = ContainerLimits(memory_mib=400, processes=60, disk_mib=48, file_mib=24)
SECONDS = patiently(60)


def task_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the image of a small task; for a fixture."""
    require(*PROGRAMS, "busybox")
    place = tmp_path_factory.mktemp("image")
    return str(write_sif(write_task_root(place / "root"), place / "task.sif"))


def made(name: str) -> Runtime:
    programs, make = RUNTIMES[name]
    require(*programs)
    return make()


def nothing_left() -> Iterator[None]:
    """Require that no process, mount or file of a container outlives its test; for a fixture."""
    before = mounts()
    yield
    assert wait_until(lambda: not running(str(home()))), running(str(home()))
    assert list(home().iterdir()) == []
    assert mounts() == before


def mounts() -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines() if PREFIX in line]


def running(words: str) -> list[str]:
    """Return the command lines of the processes that have these words in theirs."""
    lines = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [line for pid, line in lines.items() if words in line and pid != os.getpid()]


def mounted_images() -> list[str]:
    return [line for line in running(str(home())) if line.startswith("squashfuse")]


def wait_until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + patiently(20)
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@asynccontextmanager
async def started(runtime: Runtime, image: str, limits: ContainerLimits = LIMITS) -> AsyncIterator[RunningContainer]:
    container = await runtime.start(image, limits)
    try:
        yield container
    finally:
        await container.close()


async def run(shell: BashShell, command: str, seconds: float = SECONDS, most: int = 20_000) -> CommandResult:
    return await shell.run(command, seconds=seconds, max_characters=most)


async def said(shell: BashShell, command: str) -> str:
    result = await run(shell, command)
    assert result.status == 0, result
    return result.output.strip()
