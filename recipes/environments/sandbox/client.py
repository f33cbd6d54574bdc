"""The client of a sandbox, in the protocol of the NeMo-Skills sandbox (`containers/sandbox/server.py`).

A program that fails, or runs out of its time, is an answer like any other. `SandboxFailedError` is for a sandbox that
gives none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.contract.http import JsonClient, RefusedError
from recipes.environments.contract.verifier import Cell, Execution, Response
from recipes.environments.sandbox.images import run_in_image
from recipes.environments.sandbox.server import HostPort, SandboxFailedError, SandboxServer
from recipes.retry import ALWAYS, NoReplyError, RetryPolicy, TransientError, reply_within

DEFAULT_PLACE = ("127.0.0.1", 6000)
DEFAULT_CONCURRENCY = 1024
QUEUE_SECONDS = 600.0  # for a place in a sandbox that others use too
ANSWER_SECONDS = 30.0  # from the end of a program to its answer, and for the end of a session
# A program can be run again; a server that is gone is looked for again with each attempt.
RETRIES = RetryPolicy(max_retries=ALWAYS, max_unreached_retries=5, first_seconds=0.2, max_seconds=8.0, jitter=0.25)
# A cell is run once: a server that refuses for want of a place has not begun it, one that cannot be reached may have.
CELL_RETRIES = RetryPolicy(max_retries=ALWAYS, max_unreached_retries=0, first_seconds=0.2, max_seconds=8.0, jitter=0.25)


@dataclass(slots=True, kw_only=True)
class SandboxClient:
    """Runs programs, at most `max_concurrency` at a time; further ones wait here."""

    server: SandboxServer
    host_port: HostPort  # of the job's sandbox
    max_concurrency: int
    http: JsonClient = field(default_factory=JsonClient)
    _gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=dict)

    async def run(self, executions: Sequence[Execution]) -> list[Response]:
        """Return one answer per program, in their order; raises `SandboxFailedError` when one has none."""
        tasks = [asyncio.ensure_future(self._run(execution)) for execution in executions]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self, execution: Execution) -> Response:
        if execution.image:
            async with self._gate():
                return await run_in_image(execution)
        body = {
            "generated_code": execution.code,
            "std_input": execution.stdin,
            "language": execution.language,
            "timeout": execution.seconds,
            "max_output_characters": execution.max_characters,
        }
        return await self._execute(body, "", execution.seconds, RETRIES)

    async def run_cell(self, session: str, cell: Cell) -> Response:
        """Return the answer to a cell of a session, which its first cell begins; raises `SandboxFailedError`."""
        body = {
            "generated_code": cell.code,
            "language": "ipython",
            "timeout": cell.seconds,
            "max_output_characters": cell.max_characters,
        }
        return await self._execute(body, session, cell.seconds, CELL_RETRIES)

    async def end_session(self, session: str) -> None:
        """End a session. A sandbox that cannot be asked ends it itself, once nobody has used it for some time."""
        with contextlib.suppress(TransientError, RefusedError, SandboxFailedError, TimeoutError):
            address = await self.server.address(self.host_port)
            headers = {"authorization": f"Bearer {address.token}"}
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.http.delete(f"{address.url}/sessions/{session}", headers=headers)

    async def _execute(self, body: Mapping[str, Any], session: str, seconds: float, retries: RetryPolicy) -> Response:
        limit = seconds + ANSWER_SECONDS

        async def ask() -> Response:
            address = await self.server.address(self.host_port)
            headers = {"authorization": f"Bearer {address.token}", **({"X-Session-ID": session} if session else {})}
            try:
                async with asyncio.timeout(limit):
                    reply = await self.http.post(f"{address.url}/execute", body, headers=headers)
            except TimeoutError as error:
                late = f"{address.url}/execute: no reply within {limit:g} s"
                raise RefusedError(late) if session else TransientError(late) from error  # a cell is run once
            if not isinstance(reply.body.get("process_status"), str):
                raise RefusedError(f"{address.url}/execute answered no process_status: {str(reply.body)[:200]}")
            return reply.body

        try:
            async with self._gate():
                return await reply_within(seconds + QUEUE_SECONDS, ask, retries)
        except RefusedError as error:
            raise SandboxFailedError(f"the sandbox gave no answer: {error}") from error
        except NoReplyError as error:
            await self.server.notice_end()  # else the next program would ask a server that is ending
            raise SandboxFailedError(f"the sandbox gave no answer: {error}") from error

    def _gate(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = asyncio.Semaphore(min(self.max_concurrency, self.server.places))
        return self._gates[loop]


def client_of(settings: object, server: SandboxServer, http: JsonClient) -> SandboxClient:
    """Return the client of a resources server whose settings may name a sandbox, and how many programs run at once."""
    host, port = (
        getattr(settings, "sandbox_host", DEFAULT_PLACE[0]),
        getattr(settings, "sandbox_port", DEFAULT_PLACE[1]),
    )
    most = getattr(settings, "num_processes", DEFAULT_CONCURRENCY)
    return SandboxClient(server=server, host_port=(str(host), int(port)), max_concurrency=int(most), http=http)
