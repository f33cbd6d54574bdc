"""Twenty thousand verifications, 256 at a time, while connections drop, judges are slow and servers answer 500."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from speed import patiently

from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.verifier import NoVerdict, Verdict, message_item, response_object
from recipes.environments.instances import VERIFIERS
from recipes.environments.scoring.clients import HttpVerifier, InProcessVerifier
from recipes.environments.scoring.judge import JudgeClient
from recipes.environments.scoring.pool import ScoringPool
from tools.tiny.rule_judge import RuleServer

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT, CONCURRENCY = 20_000, 256
FAULTS = 0.02  # share of requests
SLOW_SECONDS = 2.0
KINDS = ("drop before", "drop after", "500", "slow")
ROW = {"responses_create_params": {"input": "q"}, "agent_ref": {"name": "a"}}


class FaultyProxy:
    """Hands requests on to a server, and spoils a fixed share of them."""

    def __init__(self, target: str) -> None:
        self.target, self.faults = target, Counter[str]()
        self.num_requests = 0
        self._random = random.Random(7)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.url = ""
        threading.Thread(target=self._serve, daemon=True).start()
        assert self._ready.wait(60)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._ready.set()

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.num_requests += 1
        fault = self._random.choice(KINDS) if self._random.random() < FAULTS else ""
        self.faults[fault] += 1
        if fault == "500":
            return web.Response(status=500, text="spoiled")
        if fault == "drop before":
            return self._drop(request)
        if fault == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        kept = {name: request.headers[name] for name in ("content-type", "cookie") if name in request.headers}
        async with self._session.post(f"{self.target}{request.path}", data=await request.read(), headers=kept) as reply:
            body = await reply.read()
            cookies = {"set-cookie": reply.headers["set-cookie"]} if "set-cookie" in reply.headers else {}
        if fault == "drop after":
            return self._drop(request)
        return web.Response(status=reply.status, body=body, content_type="application/json", headers=cookies)

    @staticmethod
    def _drop(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


@contextmanager
def served(name: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tools.environments.serve_env", "--name", name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, f"{name} did not start"
            yield found.group()
        finally:
            process.terminate()
            process.wait(timeout=patiently(20))


async def test_faults_lose_no_verification_and_change_no_verdict() -> None:
    rules, pool = RuleServer(0), ScoringPool(num_workers=1)
    with served("mcqa") as url, rules.serving():
        server, judge = FaultyProxy(url), FaultyProxy(f"http://127.0.0.1:{rules.port}")
        http = JsonClient(connections=CONCURRENCY)
        judged = VERIFIERS["over_refusal_detection"]
        clients: list[Any] = [
            HttpVerifier(name="mcqa", url=server.url, timeout_seconds=patiently(60), http=http),
            InProcessVerifier(
                name="over_refusal_detection", verifier=judged, settings=judged.settings(), pool=pool,
                timeout_seconds=patiently(60),
                judge=JudgeClient(
                    name="judge", urls=(f"{judge.url}/v1",), model="rules", params={}, http=http,
                    timeout_seconds=patiently(60), max_concurrency=CONCURRENCY,
                ),
            ),
        ]  # fmt: skip
        gate, seconds = asyncio.Semaphore(CONCURRENCY), list[float]()

        async def verify(number: int) -> tuple[bool, str]:
            """Return whether the verdict is the right one, or why there is none."""
            is_right, is_judged = number % 3 == 0, number % 4 == 0
            if is_judged:
                row, text = {**ROW, "safe_prompt": f"question {number}"}, "Yes, so." if is_right else "No, never."
            else:
                row = {**ROW, "uuid": str(number), "options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B"}
                text = "\\boxed{B}" if is_right else "\\boxed{A}"
            async with gate:
                start = time.monotonic()
                verdict = await clients[is_judged].verify(row, response_object([message_item(text)]))
                seconds.append(time.monotonic() - start)
            if isinstance(verdict, NoVerdict):
                return True, verdict.reason
            assert isinstance(verdict, Verdict)
            return verdict.reward == float(is_right), ""

        start = time.monotonic()
        ended = await asyncio.gather(*(verify(number) for number in range(COUNT)))
        took = time.monotonic() - start
        await http.close()
        pool.close()
        server.close()
        judge.close()
    without = Counter(reason for _, reason in ended if reason)
    faults = server.faults + judge.faults
    print(f"{COUNT / took:.0f} verifications a second, p99 {sorted(seconds)[int(0.99 * COUNT)]:.2f} s,")
    print(f"{server.num_requests + judge.num_requests} requests, faults {dict(faults)}, no verdict {without.total()}")
    assert len(ended) == COUNT and all(is_as_expected for is_as_expected, _ in ended)
    assert all(faults[kind] > 0.5 * FAULTS / len(KINDS) * COUNT for kind in KINDS)
    # A verification ends without a verdict only when three attempts in a row fail.
    assert without.total() <= COUNT // 1000
    assert all(re.search("attempts: 3|no reply within", reason) for reason in without), without
