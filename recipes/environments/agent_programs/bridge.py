"""The container of a task for a program beside it: lines of JSON over a socket, one command after the other."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.agents.coding.terminal import checked_command
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
