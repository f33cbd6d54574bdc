"""The sessions of a resources server: what one has in the sandbox ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from recipes.environments.contract.http import JsonClient
from recipes.environments.instances import VERIFIERS
from recipes.environments.sandbox.client import SandboxClient
from recipes.environments.sandbox.server import SandboxServer
from recipes.environments.scoring.clients import InProcessVerifier
from recipes.environments.scoring.pool import ScoringPool
from recipes.environments.server import resources as server_sessions
from recipes.environments.server.resources import Sessions
from recipes.environments.verifiers.ns_tools import TOOL


class Sandbox:
    """A sandbox that keeps the names of the sessions it ended."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def execute(self, request: web.Request) -> web.Response:
        self.begun.append(request.headers["X-Session-ID"])
        return web.json_response({"process_status": "completed", "stdout": "1\n", "stderr": ""})

    async def end(self, request: web.Request) -> web.Response:
        self.ended.put_nowait(request.match_info["name"])
        return web.json_response({})


@pytest.fixture
async def sandbox() -> Sandbox:
    return Sandbox()


@pytest.fixture
async def sessions(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sessions]:
    app = web.Application()
    app.router.add_post("/execute", sandbox.execute)
    app.router.add_delete("/sessions/{name}", sandbox.end)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("SANDBOX_TOKEN", "token")
    pool, http, host_port = ScoringPool(num_workers=1), JsonClient(), ("127.0.0.1", runner.addresses[0][1])
    client = InProcessVerifier(
        name="ns_tools",
        verifier=VERIFIERS["ns_tools"],
        settings=VERIFIERS["ns_tools"].settings(),
        pool=pool,
        timeout_seconds=60,
        sandbox=SandboxClient(server=SandboxServer(), host_port=host_port, max_concurrency=4, http=http),
    )
    yield Sessions(client)
    await http.close()
    pool.close()
    await runner.cleanup()


async def test_a_session_that_is_begun_anew_ends_the_one_before(sessions: Sessions, sandbox: Sandbox) -> None:
    sessions.seed("a")
    await sessions.call("a", TOOL, {"code": "1"})
    sessions.seed("a")
    assert await asyncio.wait_for(sandbox.ended.get(), 60) == sandbox.begun[0]
    await sessions.call("a", TOOL, {"code": "1"})
    assert sandbox.begun[1] != sandbox.begun[0]


async def test_a_session_that_makes_room_for_another_ends(
    sessions: Sessions, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_sessions, "MAX_SESSIONS", 2)
    for name in ("a", "b"):
        sessions.seed(name)
        await sessions.call(name, TOOL, {"code": "1"})
    sessions.seed("c")
    assert await asyncio.wait_for(sandbox.ended.get(), 60) == sandbox.begun[0]
    assert sandbox.ended.empty()
    await sessions.call("b", TOOL, {"code": "1"})
    with pytest.raises(KeyError):
        await sessions.call("a", TOOL, {"code": "1"})
