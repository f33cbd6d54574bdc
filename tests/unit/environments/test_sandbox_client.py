"""The client of a sandbox, against a server that does not answer in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import Cell, Execution
from recipes.environments.sandbox import client as sandbox_client
from recipes.environments.sandbox.client import SandboxClient
from recipes.environments.sandbox.server import SandboxFailedError, SandboxServer


class SlowOnce:
    """A sandbox that answers all requests but the first."""

    port = 0
    num_requests = 0
    refusal = ""  # of all requests, instead

    async def execute(self, request: web.Request) -> web.Response:
        await request.read()
        self.num_requests += 1
        if self.refusal:
            return web.json_response({"error": self.refusal}, status=400)
        if self.num_requests > 1:
            return web.json_response({"process_status": "completed", "stdout": "", "stderr": ""})
        while request.transport is not None:  # until the client has gone
            await asyncio.sleep(0.05)
        raise web.HTTPServiceUnavailable


@pytest.fixture
async def sandbox() -> AsyncIterator[SlowOnce]:
    made, app = SlowOnce(), web.Application()
    app.router.add_post("/execute", made.execute)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


@pytest.fixture
async def client(sandbox: SlowOnce, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SandboxClient]:
    monkeypatch.setenv("SANDBOX_TOKEN", "token")
    monkeypatch.setattr(sandbox_client, "ANSWER_SECONDS", 0.5)
    http = JsonClient()
    yield SandboxClient(server=SandboxServer(), host_port=("127.0.0.1", sandbox.port), max_concurrency=4, http=http)
    await http.close()


async def test_a_program_without_an_answer_is_run_again(client: SandboxClient, sandbox: SlowOnce) -> None:
    (answer,) = await client.run([Execution(language="python3", code="", seconds=0.5)])
    assert answer["process_status"] == "completed"
    assert sandbox.num_requests > 1


async def test_a_cell_without_an_answer_is_run_once(client: SandboxClient, sandbox: SlowOnce) -> None:
    with pytest.raises(SandboxFailedError, match=r"/execute: no reply within 1 s$"):
        await client.run_cell("a-session", Cell(code="", seconds=0.5, max_characters=10))
    assert sandbox.num_requests == 1


class Watched(SandboxServer):
    """A server of our own that counts how often its end is looked for."""

    num_noticed = 0

    async def notice_end(self) -> None:
        """Count."""
        self.num_noticed += 1


async def test_a_refusal_is_no_end_of_the_server(client: SandboxClient, sandbox: SlowOnce) -> None:
    """Each look for an end may take a second: a language that is not installed must not cost that per program."""
    client.server, sandbox.refusal = Watched(), "language 'lean4' is not installed here"
    with pytest.raises(SandboxFailedError, match="not installed here"):
        await client.run([Execution(language="lean4", code="", seconds=0.5)])
    assert client.server.num_noticed == 0
