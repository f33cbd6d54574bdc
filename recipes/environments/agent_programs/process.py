"""A program as a process of this machine: its task on standard input, its result the last line that it prints.

Its files are in a directory of its own, which goes with it. Where bubblewrap is installed it runs in a process
namespace, so that nothing that it started outlives it; it ends with this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.environments.agents.coding.programs import AgentProgram
from recipes.environments.swe.containers.waiting import has_ended

MAX_FILE_BYTES = 64 << 20  # of what it prints
MAX_SHOWN = 400  # characters of what it said in a reason
END_SECONDS = 30.0
KEPT = ("PATH", "LANG", "SSL_CERT_FILE")
# The signal at a parent's death means the thread that forked, and this one never ends.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="agent-spawner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended: its status and its result; both None where it was killed."""

    status: int | None
    result: Mapping[str, Any]
    said: str  # the end of its standard error


async def run_program(
    program: AgentProgram, task: Mapping[str, Any], place: Path, *, descriptor: int, until: Awaitable[object]
) -> Ended:
    """Run a program until it ends or `until` does; then nothing of it is left. Raises `OSError`."""
    (place / "task").write_text(json.dumps(task), encoding="utf-8")
    base_url = task["model_server"]["base_url"]
    environment = {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        **program.environment,
        **{"HOME": str(place), "TMPDIR": str(place), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*"},
        **{"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "of-the-path"},
    }

    def fork() -> subprocess.Popen[bytes]:
        with (place / "task").open("rb") as stdin, (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            return subprocess.Popen(
                [*_limits(), *program.words],
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=place,
                pass_fds=(descriptor,),
                process_group=0,
            )

    process = await _forked(asyncio.wrap_future(_SPAWNER.submit(fork)))
    waiting = [asyncio.ensure_future(has_ended(process, float(task["seconds"]))), asyncio.ensure_future(until)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        status = process.poll()
        _kill(process)
        await has_ended(process, END_SECONDS)
    result = _result(_tail(place / "out")) if status == 0 else {}
    return Ended(status=status, result=result, said=" ".join(_tail(place / "err").split())[-MAX_SHOWN:])


async def _forked(forking: asyncio.Future[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Return the process that another thread starts; one whose rollout ends meanwhile is ended, too."""
    try:
        return await asyncio.shield(forking)
    except asyncio.CancelledError:
        with suppress(OSError):
            process = await forking
            _kill(process)
            await has_ended(process, END_SECONDS)
        raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _limits() -> list[str]:
    """Return the words before a program's own."""
    words = ["setpriv", "--pdeathsig", "KILL", "--", "prlimit", f"--fsize={MAX_FILE_BYTES}", "--core=0", "--"]
    if shutil.which("bwrap"):
        words += ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent", "--"]
    return words


def _tail(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - 65536, 0))
        return file.read().decode("utf-8", "replace")
    return ""


def _result(printed: str) -> Mapping[str, Any]:
    """Return the object in the last line of an output; empty for anything else."""
    lines = printed.strip().splitlines()
    with suppress(ValueError, RecursionError):
        found = json.loads(lines[-1]) if lines else None
        if isinstance(found, dict):
            return found
    return {}
