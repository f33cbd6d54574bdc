"""Places for containers: shared by the processes of a machine, and given back by one that is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from recipes.environments.swe.containers.admission import Admission
from recipes.environments.swe.contract import ContainerFailedError

HOLDER = """
import asyncio, sys
from pathlib import Path
from recipes.environments.swe.containers.admission import Admission

async def main():
    async with Admission(1, directory=Path(sys.argv[1])).reserve(seconds=60):
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_place_of_another_process_is_waited_for_until_it_is_killed(tmp_path: Path) -> None:
    with ExitStack() as ends:
        words = [sys.executable, "-c", HOLDER, str(tmp_path)]
        holder = ends.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        ends.callback(holder.kill)
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ContainerFailedError, match=r"none of the 1 slots for containers was free within 0\.1 s"):
            async with Admission(1, directory=tmp_path).reserve(seconds=0.1):
                pass
        async with Admission(2, directory=tmp_path).reserve(seconds=60):  # a machine with more room has another one
            pass
        holder.kill()
        async with Admission(1, directory=tmp_path).reserve(seconds=60):
            pass


async def test_a_process_takes_its_share_only_and_gives_back_what_a_cancelled_one_held(tmp_path: Path) -> None:
    admission, now, most = Admission(4, own=2, directory=tmp_path), 0, 0

    async def work() -> None:
        nonlocal now, most
        async with admission.reserve(seconds=60):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    await asyncio.gather(*(work() for _ in range(8)))
    assert most == 2

    async def hold() -> None:
        async with admission.reserve(seconds=60):
            await asyncio.Event().wait()

    holding = [asyncio.create_task(hold()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    await asyncio.gather(*(work() for _ in range(4)))


async def test_a_directory_of_somebody_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ContainerFailedError, match="link is no directory of this user"):
        async with Admission(1, directory=tmp_path / "link").reserve(seconds=60):
            pass
