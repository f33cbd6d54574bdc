"""What the bench of verifiers counts."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from recipes.environments.contract.verifier import NoVerdict, Response, Verdict, env_failed, last_message_text
from recipes.errors import RunError
from recipes.types import Row
from tools.bench import verifiers


async def test_each_answer_is_asked_about_once_and_failures_are_counted() -> None:
    asked: list[tuple[object, str]] = []
    running = most = 0

    async def verify(row: Row, response: Response) -> Verdict | NoVerdict:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        asked.append((row["n"], last_message_text(response)))
        return env_failed("no") if row["n"] else Verdict(reward=1.0, reason="yes")

    speed = await verifiers.measure(verify, [{"n": 0}, {"n": 1}], count=20, concurrency=4)
    assert len(asked) == len({text for _, text in asked}) == 21  # one more, before the time begins
    assert (speed.num_failed, most) == (10, 4)
    assert speed.per_second > 0 and speed.p99 >= 0


def test_one_environment_is_measured_alone() -> None:
    row = {"responses_create_params": {"input": "q"}, "options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B"}
    assert verifiers.function_alone("mcqa", {}, [row], count=10) > 0


@pytest.mark.parametrize(
    ("per_second", "plain", "stall", "num_failed", "is_kept"),
    [
        (1000, 9000, 0.2, 0, True),
        (900, 9000, 0.1, 0, False),
        (500, 600, 0.1, 0, True),  # a machine on which nothing is faster
        (470, 600, 0.1, 0, False),
        (1500, 9000, 0.3, 0, False),
        (1500, 9000, 0.1, 1, False),
    ],
)
def test_a_burst_has_two_limits(per_second: float, plain: float, stall: float, num_failed: int, is_kept: bool) -> None:
    found = verifiers.Burst(count=8, per_second=per_second, plain_per_second=plain, stall=stall, num_failed=num_failed)
    assert found.is_kept == is_kept
    said = " ".join(found.lines())
    assert ("BELOW" in said or "ABOVE" in said) == (not is_kept and not num_failed)


async def test_a_burst_asks_at_once_and_finds_what_blocks_the_event_loop() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(EOFError, OSError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.rpartition(b"content-length: ")[2]))
                status = b"200 OK" if head.startswith(b"POST /verify ") else b"404 Not Found"
                writer.write(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\n{}" % status)

    async def verify(row: Row, response: Response) -> Verdict | NoVerdict:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if last_message_text(response).endswith(" 99"):
            time.sleep(0.3)
        return Verdict(reward=1.0, reason="yes")

    running = most = 0
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found = await verifiers.burst(url, verify, [{"n": 0}], count=200)
    assert most == 200 and found.num_failed == 0 and found.plain_per_second > 0
    assert found.stall > 0.25 and not found.is_kept
    with pytest.raises(RunError, match="404"):
        await verifiers.plain_speed(f"{url}/other", [b"{}"], count=1)
    server.close()
