"""Connections that send no whole request are closed, others are left alone."""

from __future__ import annotations

import ast
import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from recipes.cluster import http_limits
from recipes.cluster.http_limits import LimitedProtocol, most_connections

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 0.3
WAIT = 20.0  # seconds after which a test that waits has failed
WHOLE = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"


class Quick(LimitedProtocol):
    head_seconds = body_seconds = unread_seconds = SECONDS


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the number of bytes of the body, "/slow" after a while, before it reads and before it answers."""
    pause = 1.5 * SECONDS if scope["path"] == "/slow" else 0.0
    await asyncio.sleep(pause)
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await asyncio.sleep(pause)
    said = str(size).encode()
    headers = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@asynccontextmanager
async def serving(app: Any = echo) -> AsyncIterator[int]:
    held = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=Quick, lifespan="off", log_config=None))
    task = asyncio.create_task(server._serve([held]))
    try:
        async with asyncio.timeout(WAIT):
            while not server.started:
                await asyncio.sleep(0.01)
            yield held.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


PARTS = {"nothing": b"", "head": WHOLE[:30], "body": WHOLE[:-1], "second": WHOLE, "at once": WHOLE + WHOLE[:-1]}


@pytest.mark.parametrize("sent", PARTS.values(), ids=PARTS)
async def test_a_request_that_does_not_arrive_ends_its_connection(sent: bytes) -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        if sent.startswith(WHOLE):
            assert await answer(reader) == b"2"
            writer.write(WHOLE[:5] if sent == WHOLE else b"")
        assert await reader.read() == b""
        writer.close()


async def test_bytes_that_trickle_in_do_not_prolong_it() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ended = asyncio.create_task(reader.read())
        for byte in WHOLE * 3:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([ended], timeout=SECONDS / 10)
            if done:
                break
        assert ended.done()
        writer.close()


async def test_a_slow_program_loses_no_request() -> None:
    large = b"x" * (1 << 20)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(large) + large)
            assert await answer(reader) == str(len(large)).encode()
        writer.close()


async def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    gone = asyncio.Event()

    async def write(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})

    async def endless(_scope: Any, receive: Any, send: Any) -> None:
        writing = asyncio.create_task(write(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        gone.set()

    async with serving(endless) as port:
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.send(WHOLE)
            await asyncio.wait_for(gone.wait(), WAIT)


async def test_connections_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_CONNECTIONS", 2)
    async with serving() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(SECONDS / 10)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            writer.write(WHOLE)
            await answer(reader)
        assert [await one.read() for one, _ in held] == [b"", b""]  # they were silent: there is room again
        reader, again = await asyncio.open_connection("127.0.0.1", port)
        again.write(WHOLE)
        assert await answer(reader) == b"2"
        for one in (writer, again, *(one for _, one in held)):
            one.close()


def test_half_of_the_files_of_a_process_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (1024, 4096))
    assert most_connections() == 512


def test_every_server_has_these_limits() -> None:
    found: dict[str, str] = {}
    for path in (*(ROOT / "recipes").rglob("*.py"), *(ROOT / "tools").rglob("*.py")):
        if "uvicorn.Config(" in (text := path.read_text()):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "uvicorn.Config":
                    chosen = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    found[str(path.relative_to(ROOT))] = chosen.get("http", "")
    assert len(found) >= 3 and set(found.values()) == {"LimitedProtocol"}, found
