"""A program as a process of this machine: its task on standard input, its result the last line that it prints.

Its files are in a directory of its own, which goes with it. Where bubblewrap is installed it runs in a process
namespace, so that nothing that it started outlives it; it ends with this process.

The container of a task for a program beside it: lines of JSON over a socket, one command after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.confinement import jails
from recipes.environments.agents.coding.programs import AgentProgram
from recipes.environments.agents.coding.terminal import checked_command
from recipes.environments.swe.containers.waiting import has_ended
from recipes.environments.swe.contract import ContainerEndedError, Shell

MAX_LINE = 64 << 20  # bytes of one request: more than a model can write in one answer, however it is escaped
MAX_CHARACTERS = 200_000  # of one output; programs cut it further


@dataclass(slots=True, kw_only=True)
class Bridge:
    """Answers the requests of one program by a shell of the container."""

    shell: Shell
    seconds: float  # that one command may take
    descriptor: int  # of the program's side
    ended: asyncio.Future[ContainerEndedError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_commands: int = 0
    num_late: int = 0
    num_dropped: int = 0  # characters that were cut out of outputs

    async def answer(self, line: bytes) -> dict[str, Any]:
        """Run the command of one request; what is wrong with it is a command that failed."""
        try:
            request = json.loads(line)
            command, seconds = checked_command(request["command"]), float(request.get("seconds", self.seconds))
            seconds = min(max(seconds, 1.0), self.seconds) if seconds < self.seconds else self.seconds  # as for NaN
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return {"output": f"the command was not run: {error}", "status": 2}
        self.num_commands += 1
        if request.get("lasting") is not True:  # then it leaves the next one's directory and variables alone
            command = f"bash -c {shlex.quote(command)}"
        try:
            done = await self.shell.run(command, seconds=seconds, max_characters=MAX_CHARACTERS)
        except ContainerEndedError as error:
            if not self.ended.done():
                self.ended.set_result(error)
            return {"ended": str(error.end)}
        self.num_late += done.status is None
        self.num_dropped += done.num_dropped
        return {"output": done.output.encode("utf-8", "replace").decode("utf-8"), "status": done.status}


@asynccontextmanager
async def bridge_to(shell: Shell, *, seconds: float) -> AsyncIterator[Bridge]:
    """Serve a shell on a new socket, whose other side a program inherits."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
    bridge = Bridge(shell=shell, seconds=seconds, descriptor=theirs.fileno())

    async def serve() -> None:
        with suppress(OSError, ValueError):  # it went away, or wrote a line beyond the limit
            while line := await reader.readline():
                writer.write(json.dumps(await bridge.answer(line)).encode() + b"\n")
                await writer.drain()
        writer.close()  # the program must not wait for an answer that does not come

    serving = asyncio.create_task(serve())
    try:
        yield bridge
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        writer.close()
        theirs.close()


MAX_FILE_BYTES = 64 << 20  # of what it prints
MAX_SHOWN = 400  # characters of its standard error in a reason
END_SECONDS = 30.0
KEPT = ("PATH", "LANG", "SSL_CERT_FILE")
# The signal at a parent's death means the thread that forked, and this one never ends.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="agent-spawner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended: its status and its result; both None where it was killed."""

    status: int | None
    result: Mapping[str, Any]
    stderr: str  # the end of its standard error


async def run_program(
    program: AgentProgram, task: Mapping[str, Any], directory: Path, *, descriptor: int, until: Awaitable[object]
) -> Ended:
    """Run a program until it ends or `until` does; then nothing of it is left. Raises `OSError`."""
    (directory / "task").write_text(json.dumps(task), encoding="utf-8")
    base_url = task["model_server"]["base_url"]
    environment = {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        **program.environment,
        **{"HOME": str(directory), "TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*"},
        **{"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "of-the-path"},
    }

    def fork() -> subprocess.Popen[bytes]:
        with (
            (directory / "task").open("rb") as stdin,
            (directory / "out").open("wb") as out,
            (directory / "err").open("wb") as err,
        ):
            return subprocess.Popen(
                [*_limits(), *program.words],
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=directory,
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
    result = _result(_tail(directory / "out")) if status == 0 else {}
    return Ended(status=status, result=result, stderr=" ".join(_tail(directory / "err").split())[-MAX_SHOWN:])


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
    limits = ["setpriv", "--pdeathsig", "KILL", "--", "prlimit", f"--fsize={MAX_FILE_BYTES}", "--core=0", "--"]
    return [*limits, *jails.agent()]


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
