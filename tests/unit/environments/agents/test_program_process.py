"""The process of an agent program whose rollout ends while it is started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.agents.coding.programs import AgentProgram
from recipes.environments.agents.programs import process

WAIT = 20.0


async def test_a_program_that_starts_as_its_rollout_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, began = [], threading.Event()

    def fork(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        began.set()
        time.sleep(0.2)  # the rollout ends meanwhile
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0))
        return started[0]

    monkeypatch.setattr(process, "subprocess", type("Slow", (), {"Popen": fork}))
    program = AgentProgram(name="slow", adapter=tmp_path, environment={})
    task = {"model_server": {"base_url": "http://127.0.0.1:9"}, "seconds": 60}
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(process.run_program(program, task, tmp_path, descriptor=0, until=never))
    await asyncio.to_thread(began.wait, WAIT)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, WAIT)
    await asyncio.sleep(0.3)
    (left,) = started
    try:
        assert left.poll() == -9
    finally:
        if left.poll() is None:
            os.killpg(left.pid, 9)
            left.wait()
