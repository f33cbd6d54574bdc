"""The connections of the HTTP client end with it, wherever the event loop is that opened them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.environments.contract.http import AT_A_TICK, JsonClient, RefusedError, Turns


class Answers(BaseHTTPRequestHandler):
    """Answers what it was sent, and keeps the connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(int(self.path.strip("/") or 200))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


async def test_half_a_surrogate_pair_is_carried_as_a_question_mark(url: str) -> None:
    client = JsonClient()
    sent = {"text": "a\ud800b", "right": "\u00e4 \U0001f600"}
    assert (await client.post(url, sent)).body == {**sent, "text": "a?b"}
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for beyond_json in ({"a": {1}}, {"a\ud800": float("nan")}, {"a": deep}):
        with pytest.raises(TypeError):
            await client.post(url, beyond_json)
    await client.close()


@pytest.mark.parametrize("place", ["a" * 64, "a..b:80", "[::1:80", "fd00::2:80", "", "n1:99999"])
async def test_an_address_that_is_none_is_not_asked_again(place: str) -> None:
    client = JsonClient()
    with pytest.raises(RefusedError, match="no address that can be asked"):
        await client.post(f"http://{place}/x", {})
    with pytest.raises(RefusedError, match="no address that can be asked"):
        await client.delete(f"http://{place}/x", headers={})
    await client.close()


async def test_a_redirect_is_no_answer_of_a_tool(url: str) -> None:
    client = JsonClient()
    assert await client.post_for_text(f"{url}422", {"a": 1}, cookies={}) == '{"a":1}'
    with pytest.raises(RefusedError, match="answered 307"):
        await client.post_for_text(f"{url}307", {"a": 1}, cookies={})
    await client.close()


async def test_the_connections_of_the_running_loop_are_closed(url: str) -> None:
    client = JsonClient()
    await client.post(url, {})
    session = client._session()
    client.close_all()
    await asyncio.sleep(0)
    assert session.closed


@pytest.mark.parametrize("is_loop_closed", [False, True])
def test_the_connections_of_a_loop_that_has_ended_are_closed(url: str, is_loop_closed: bool) -> None:
    client, loop = JsonClient(), asyncio.new_event_loop()
    loop.run_until_complete(client.post(url, {}))
    session = next(iter(client._sessions.values()))
    if is_loop_closed:
        loop.close()
    client.close_all()
    assert session.closed
    assert not client._sessions
    loop.close()


async def test_the_connections_of_a_stopped_loop_are_closed_from_another(url: str) -> None:
    client, loop = JsonClient(), asyncio.new_event_loop()
    await asyncio.to_thread(lambda: loop.run_until_complete(client.post(url, {})))
    session = client._sessions[loop]
    client.close_all()
    assert session.closed
    loop.close()


async def test_the_connections_of_a_loop_in_another_thread_are_closed(url: str) -> None:
    client, loop = JsonClient(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(client.post(url, {}), loop).result(timeout=60)
    session = client._sessions[loop]
    client.close_all()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=60)
    assert session.closed
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_many_requests_at_once_leave_the_event_loop_time_for_others() -> None:
    turns, begun, most = Turns(), 0, 0

    async def begin() -> None:
        nonlocal begun
        await turns.wait()
        begun += 1

    tasks = [asyncio.create_task(begin()) for _ in range(10 * AT_A_TICK)]
    while begun < len(tasks):
        before = begun
        await asyncio.sleep(0)
        most = max(most, begun - before)
    assert most <= AT_A_TICK
    await asyncio.wait_for(turns.wait(), 10)
