"""Connections that send no whole request are closed, others are left alone."""

from __future__ import annotations

import ast
import asyncio
import re
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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


async def connected(port: int, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def test_of_too_many_connections_those_that_waited_longest_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(Quick, "head_seconds", WAIT)
    monkeypatch.setattr(Quick, "body_seconds", WAIT)
    async with serving() as port:
        held = []
        for sent in (b"", WHOLE[:30], WHOLE[:-1], b""):
            held.append(await connected(port, sent))
            await asyncio.sleep(SECONDS / 10)
        reader, writer = await connected(port, WHOLE)
        assert await answer(reader) == b"2"
        for early, _ in held[:2]:
            with suppress(ConnectionError):
                assert await early.read() == b""
        for late, also in held[2:]:
            also.write(WHOLE[-1:] if also is held[2][1] else WHOLE)
            assert await answer(late) == b"2"
        for one in (writer, *(one for _, one in held)):
            one.close()


async def test_who_waits_for_his_answer_is_not_ended_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_CONNECTIONS", 2)
    async with serving() as port:
        asked = [await connected(port, WHOLE.replace(b"POST /", b"POST /slow")) for _ in range(2)]
        await asyncio.sleep(SECONDS / 10)
        reader, refused = await connected(port)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert [await answer(one) for one, _ in asked] == [b"2", b"2"]
        for one in (refused, *(one for _, one in asked)):
            one.close()


CHUNK = b"400\r\n" + b"x" * 1024 + b"\r\n"
CHUNKED = b"POST /%s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
TOO_LARGE = {
    "declared": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
    "waits for leave": b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5000\r\n\r\n",
    "chunked": CHUNKED % b"" + CHUNK * 5,
    "before it is read": CHUNKED % b"slow" + CHUNK * 5,
    "second": WHOLE + CHUNKED % b"" + CHUNK * 5,
}


@pytest.mark.parametrize("sent", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_limits, "MAX_BODY_BYTES", 4096)
    async with serving() as port:
        reader, writer = await connected(port, sent)
        if sent.startswith(WHOLE):
            assert await answer(reader) == b"2"
        assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
        reader, again = await connected(port, CHUNKED % b"" + CHUNK * 4 + b"0\r\n\r\n")
        assert await answer(reader) == b"4096"
        for one in (writer, again):
            one.close()


async def test_of_too_much_that_arrives_the_largest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_ARRIVING_BYTES", 4 << 20)
    monkeypatch.setattr(Quick, "body_seconds", WAIT)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with serving() as port:
        small = await connected(port, head % 1000 + b"x" * 500)
        large = [await connected(port, head % (5 << 20) + b"x" * (1_500_000 + number)) for number in range(3)]
        reading = [asyncio.create_task(one.read(12)) for one, _ in large]
        done, waiting = await asyncio.wait(reading, timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result() for one in done] == [b"HTTP/1.1 503"] and len(waiting) == 2
        for one in waiting:
            one.cancel()
        small[1].write(b"x" * 500)
        assert await answer(small[0]) == b"1000"
        for _, connection in (small, *large):
            connection.close()


async def test_a_pause_of_the_program_prolongs_the_time_by_its_own_length_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that sends fast makes the program pause at once; then it drips for as long as it may."""
    monkeypatch.setattr(Quick, "body_seconds", 4 * SECONDS)
    loop = asyncio.get_running_loop()
    async with serving() as port:
        started = loop.time()
        head = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n"
        reader, writer = await connected(port, head + b"x" * 100_000)  # read after 1.5 SECONDS
        ended = asyncio.create_task(reader.read())
        while not ended.done() and loop.time() < started + WAIT:
            writer.write(b"x")
            await asyncio.wait([ended], timeout=SECONDS / 10)
        assert 5 * SECONDS < loop.time() - started < 7.9 * SECONDS  # from the beginning anew it would be 8
        writer.close()


def test_half_of_the_files_of_a_process_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (1024, 4096))
    assert most_connections() == 512


def test_every_server_has_these_limits() -> None:
    found: dict[str, str] = {}
    for path in (*(ROOT / "recipes").rglob("*.py"), *(ROOT / "tools").rglob("*.py")):
        if "uvicorn.Config(" in (text := path.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "uvicorn.Config":
                    chosen = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    found[str(path.relative_to(ROOT))] = chosen.get("http", "")
    assert len(found) >= 4 and set(found.values()) == {"LimitedProtocol"}, found


def test_there_is_no_server_of_another_kind() -> None:
    """Who writes one gives it limits, a line here and one in tests/functional/test_server_limits.py."""
    sources = [*(ROOT / "recipes").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *(ROOT / "containers").rglob("*.py")]
    kinds = re.compile(
        r"HTTPServer\b|asyncio\.start_(?:unix_)?server\(|socketserver|\.create_(?:unix_)?server\(\s*(?!\()\w+,"
    )
    found = {str(path.relative_to(ROOT)) for path in sources if kinds.search(path.read_text(encoding="utf-8"))}
    assert found == {"containers/sandbox/server.py", "recipes/generation/serving/outstanding.py"}
