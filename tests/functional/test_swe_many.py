"""Many agents and many containers: all end, what they use is bounded, and nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from small_root import require
from swe_image import write_sif, write_task_root

from recipes.environments.swe.containers.places import PREFIX, home
from recipes.environments.swe.containers.processes import proportional_bytes, tree
from recipes.environments.swe.containers.runtime import BWRAP_PROGRAMS as PROGRAMS
from recipes.environments.swe.containers.runtime import BwrapRuntime
from recipes.environments.swe.contract import ContainerLimits
from tools.bench.swe import run_agents

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_AGENTS, NUM_CYCLES, AT_ONCE = 64, 1000, 8
MAX_BYTES_OF_AGENT = 48 << 20
LIMITS = ContainerLimits(memory_mib=400, processes=60, disk_mib=48, file_mib=24)


def left() -> dict[str, object]:
    """Return what this process has: descriptors, threads, children, files, mounts."""
    mounts = [line for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines() if PREFIX in line]
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "children": len(list(tree(os.getpid()))) - 1,
        "files": sorted(path.name for path in home().iterdir()),
        "mounts": mounts,
    }


class Peak:
    """The most memory that this process and all below it had together, beyond what it began with."""

    def __init__(self) -> None:
        self.first, self.most = self.now(), 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def now(self) -> int:
        return sum(proportional_bytes(one.pid) or 0 for one in tree(os.getpid()))

    def _look(self) -> None:
        while not self._is_over.wait(1.0):
            self.most = max(self.most, self.now() - self.first)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_64_agents_at_once_all_end(tmp_path: Path) -> None:
    require(*PROGRAMS, "git")
    tmp_path.chmod(0o755)
    asyncio.run(run_agents(tmp_path, 1, wait_seconds=0.0))  # imports, threads and images
    before = left()
    with Peak() as peak:
        start = time.monotonic()
        rollouts = asyncio.run(run_agents(tmp_path, NUM_AGENTS, wait_seconds=0.5))
    seconds = time.monotonic() - start
    print(f"{NUM_AGENTS} agents in {seconds:.0f} s; at most {peak.most >> 20} MiB")
    assert [rollout.reward for rollout in rollouts] == [1.0] * NUM_AGENTS, {rollout.reason for rollout in rollouts}
    assert peak.most < NUM_AGENTS * MAX_BYTES_OF_AGENT
    after = left()
    assert after["files"] == before["files"] == [] and after["children"] == before["children"]


async def test_1000_container_life_cycles_leave_nothing(tmp_path: Path) -> None:
    require(*PROGRAMS, "busybox")
    image = str(write_sif(write_task_root(tmp_path / "root"), tmp_path / "task.sif"))
    runtime, places = BwrapRuntime(), asyncio.Semaphore(AT_ONCE)

    async def cycle(number: int) -> None:
        async with places:
            container = await runtime.start(image, LIMITS)
            try:
                shell = await container.open_shell()
                command = f"echo {number} >/testbed/n; (sleep 600 &); cat /testbed/n"
                done = await shell.run(command, seconds=120, max_characters=100)
                assert done.output == f"{number}\n"
            finally:
                await container.close()

    await asyncio.gather(*(cycle(number) for number in range(AT_ONCE)))
    before = left()
    await asyncio.gather(*(cycle(number) for number in range(NUM_CYCLES)))
    assert left() == before
