"""Every server of ours: whatever strangers do to it, it answers a right request meanwhile, and ends their connections.

The limits of time and number are lowered, so that a test takes seconds.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from sandbox_client import TOKEN, Client
from small_root import require
from speed import patiently

from recipes.cluster import http_limits
from recipes.environments.agents.by_url.server import ListeningServer
from recipes.generation.engine_args import CPU_ENV, ENV
from recipes.generation.serving import requests
from recipes.generation.serving.outstanding import Listener
from tools.environments.check.judge import Judge
from tools.tiny.model import build_model, build_tokenizer
from tools.tiny.rule_judge import RuleServer

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 2.0  # in which a request has to arrive
PLACES = 40  # of connections
MAX_BODY = 1 << 20
NEW_AT_ONCE = 5  # connections of a crowd, fewer than are ended for a new one

pytestmark = pytest.mark.functional

Right = Callable[[], bool]
"""Ask the server what it is for; whether it answered."""


@contextmanager
def program(code: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/containers/sandbox", **variables}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def sandbox() -> Iterator[tuple[int, Right]]:
    require("bwrap", "prlimit", "setpriv")
    code = f"import server; server.REQUEST_SECONDS = {SECONDS}; server.MAX_STRANGERS = {PLACES}; server.main()"
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with program(code, SANDBOX_TOKEN=TOKEN, SANDBOX_HOST="127.0.0.1", NGINX_PORT=str(port)) as process:
        client = Client(str(port))
        client.wait_until_healthy(process)
        yield port, lambda: client.python("print(6 * 7)")["stdout"] == "42\n"


@contextmanager
def served_environment() -> Iterator[tuple[int, Right]]:
    code = f"""
from recipes.cluster import http_limits as limits
from tools.environments.serve_env import main
limits.LimitedProtocol.head_seconds = limits.LimitedProtocol.body_seconds = {SECONDS}
limits.MAX_CONNECTIONS, limits.MAX_BODY_BYTES = {PLACES}, {MAX_BODY}
main(["--name", "mcqa", "--port", "0"])
"""
    with program(code) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        yield port, lambda: http(port, "/seed_session", "{}") == (200, "{}")


@contextmanager
def judge_of_rules() -> Iterator[tuple[int, Right]]:
    server = RuleServer(0)
    with server.serving():
        yield server.port, lambda: http(server.port, "/v1/chat/completions", '{"messages": []}')[0] == 400


@contextmanager
def judge_of_checks() -> Iterator[tuple[int, Right]]:
    with closing(Judge()) as judge:
        yield judge.port, lambda: http(judge.port, "/v1/chat/completions", '{"messages": []}')[0] == 200


@contextmanager
def on_a_loop(start: Callable[[], Any]) -> Iterator[Any]:
    """Start a server on an event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def model_server() -> Iterator[tuple[int, Right]]:
    held = socket.create_server(("127.0.0.1", 0))
    with on_a_loop(lambda: ListeningServer.start(held)) as server:
        yield server.port, lambda: http(server.port, "/r/wrong/v1/chat/completions", "{}")[0] == 404


class OutstandingRequests:
    """Those of an engine that has said nothing yet."""

    is_dead = False

    def __init__(self) -> None:
        self.died = asyncio.Event()

    def open(self, name: str, _tell: object) -> str:
        return name

    def flush(self, _box: str) -> None: ...

    def close(self, _box: str) -> None: ...


@contextmanager
def engine_listener() -> Iterator[tuple[int, Right]]:
    held = socket.create_server(("127.0.0.1", 0), backlog=1024)

    async def start() -> Listener:
        return await Listener.start(OutstandingRequests(), held)  # type: ignore[arg-type]

    with on_a_loop(start) as server:

        async def introduced() -> bool:
            async with asyncio.timeout(patiently(10)):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
                await requests.introduce(reader, writer, server.address.key, "a-client")  # the engine has the key, too
                writer.close()
                return True

        yield server.address.port, lambda: asyncio.run(introduced())


ENDPOINT = """
import asyncio, contextlib
from recipes.cluster import http_limits as limits
from recipes.generation.engine_args import engine_args
from recipes.generation.server import HttpServer
from tests.configuration import block
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

limits.LimitedProtocol.head_seconds = limits.LimitedProtocol.body_seconds = {seconds}
limits.MAX_CONNECTIONS, limits.MAX_BODY_BYTES = {places}, {max_body}

async def main():
    cfg = block("policy.generation", vllm_cfg=block("policy.generation.vllm_cfg", expose_http_server=True))
    args = engine_args(cfg, model_path={model!r}, seed=0, is_cpu=True, loads_weights=False)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    server = await HttpServer.start(llm, cfg, host="127.0.0.1", count=lambda _: contextlib.nullcontext())
    print("at", server.base_url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
QUESTION = '{"model": "policy", "messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 1}'


@contextmanager
def model_endpoint() -> Iterator[tuple[int, Right]]:
    """Serve a model as a run does for agents that speak HTTP: vLLM's own application behind our guards."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = build_tokenizer()
        for part in (tokenizer, build_model(tokenizer, seed=0)):
            part.save_pretrained(directory)
        code = ENDPOINT.format(seconds=SECONDS, places=PLACES, max_body=MAX_BODY, model=directory)
        with program(code, **ENV, **CPU_ENV, VLLM_API_KEY=TOKEN) as process:
            assert process.stdout is not None
            urls = (line.split()[1] for line in process.stdout if line.startswith("at http"))
            port = urlsplit(next(urls)).port
            assert port
            assert http(port, "/v1/chat/completions", QUESTION)[0] == 401  # without the key
            yield port, lambda: http(port, "/v1/chat/completions", QUESTION, key=TOKEN)[0] == 200


SERVERS = {
    "sandbox": sandbox,
    "serve-env": served_environment,
    "judge of rules": judge_of_rules,
    "judge of checks": judge_of_checks,
    "model server": model_server,
    "vLLM's endpoint": model_endpoint,
    "engine": engine_listener,
}


def http(port: int, path: str, body: str, *, key: str = "") -> tuple[int, str]:
    with closing(socket.create_connection(("127.0.0.1", port), timeout=patiently(20))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        head, _, said = connection.makefile("rb").read().decode().partition("\r\n\r\n")
    return int(head.split()[1]), said


POST = b"POST /verify HTTP/1.1\r\nHost: x\r\n"
CHUNK = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
DRIP = 0.2
ATTACKS: dict[str, tuple[bytes, bytes, float]] = {  # what is sent first, and then again after so many seconds
    "silent": (b"", b"", DRIP),
    "dripping head": (b"GET / HTTP/1.1\r\nX: ", b"y", DRIP),
    "dripping body": (POST + b"Content-Length: 1000\r\n\r\n", b"y", DRIP),
    "endless head": (b"GET / HTTP/1.1\r\n", b"X: " + b"y" * 1000 + b"\r\n", 0.0),
    "endless line": (b"GET /", b"y" * 10_000, 0.0),
    "huge body": (POST + b"Content-Length: 99999999999999\r\n\r\n", b"y" * 65536, 0.0),
    "endless body": (POST + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK, 0.0),
    "endless trailer": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: " + b"y" * 1000 + b"\r\n", 0.0),
}


def attack(port: int, first: bytes, again: bytes, pause: float) -> int:
    """Send until the server ends the connection; returns how many bytes it took. Fails when it does not in time."""
    taken, end = 0, time.monotonic() + patiently(4 * SECONDS)
    connection = socket.create_connection(("127.0.0.1", port), timeout=patiently(10))
    with closing(connection), suppress(ConnectionError):
        connection.sendall(first)
        while time.monotonic() < end:
            connection.settimeout(max(pause, 0.001))
            with suppress(TimeoutError):
                if connection.recv(65536) == b"":
                    return taken
            connection.settimeout(patiently(10))
            connection.sendall(again)
            taken += len(again)
        raise AssertionError(f"the connection is still open after {patiently(4 * SECONDS):g} s")
    return taken


@contextmanager
def crowd(port: int, number: int) -> Iterator[None]:
    """Hold connections that send a byte now and then, and replace those that end, a hundred in a second."""
    held: list[socket.socket] = []
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            num_new = 0
            for index, one in enumerate(held):
                try:
                    one.sendall(b"y")
                except OSError:
                    if (num_new := num_new + 1) <= NEW_AT_ONCE:
                        one.close()
                        with suppress(OSError):
                            held[index] = begun()

    def begun() -> socket.socket:
        one = socket.create_connection(("127.0.0.1", port), timeout=patiently(20))
        one.sendall(b"GET / HTTP/1.1\r\nX: ")
        return one

    held.extend(begun() for _ in range(number))
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for one in held:
            one.close()


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Right]]:
    monkeypatch.setattr(http_limits.LimitedProtocol, "head_seconds", SECONDS)
    monkeypatch.setattr(http_limits.LimitedProtocol, "body_seconds", SECONDS)
    monkeypatch.setattr(http_limits, "MAX_CONNECTIONS", PLACES)
    monkeypatch.setattr(http_limits, "MAX_BODY_BYTES", MAX_BODY)
    monkeypatch.setattr(requests, "HANDSHAKE_SECONDS", SECONDS)
    with SERVERS[request.param]() as served:
        yield served


def test_every_server_withstands_strangers(server: tuple[int, Right]) -> None:
    port, answers = server
    assert answers()
    with ThreadPoolExecutor(len(ATTACKS)) as threads:
        attacks = {name: threads.submit(attack, port, *what) for name, what in ATTACKS.items()}
        while not all(one.done() for one in attacks.values()):
            assert answers()
        taken = {name: one.result() for name, one in attacks.items()}
    assert max(taken.values()) < MAX_BODY + (8 << 20), taken  # the kernel's buffers hold some MiB
    assert answers()


def test_a_crowd_that_drips_and_comes_again_keeps_nobody_out(server: tuple[int, Right]) -> None:
    port, answers = server
    with crowd(port, 5 * PLACES):
        end, number = time.monotonic() + 1.5 * SECONDS, 0
        while time.monotonic() < end:
            assert answers()
            number += 1
    assert number >= 2 and answers()


@pytest.mark.slow
def test_as_many_connections_as_the_sandbox_has_places_do_not_shut_it() -> None:
    """With its real limits: they drip for longer than the time of a request."""
    require("bwrap", "prlimit", "setpriv")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        variables = {"SANDBOX_TOKEN": TOKEN, "SANDBOX_HOST": "127.0.0.1", "NGINX_PORT": str(port)}
        process = stack.enter_context(program("import server; server.main()", **variables))
        client = Client(str(port))
        client.wait_until_healthy(process)
        with crowd(port, 2048):
            end = time.monotonic() + 80.0
            while time.monotonic() < end:
                assert client.python("print(6 * 7)")["stdout"] == "42\n"
                time.sleep(1.0)
