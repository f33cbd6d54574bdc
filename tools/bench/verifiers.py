"""`python -m tools.bench.verifiers` (`make bench-verifiers`): how many verdicts a second each environment gives.

Three ways: the verifier's function alone, in this process as a run calls it, and over HTTP from a server of its own.
The function alone is measured where a verifier asks no judge and runs no program. Judges are a server on this machine
that answers at once, so the figures are those of everything but the judge's model.

Then one environment gets many requests at the same moment, as at the end of a step. The limits are the speed of our
client, also beside a program that only sends the same bytes and reads the replies, and the longest time for which the
client's event loop does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from recipes.environments.contract.verifier import NoVerdict, Response, Verdict, advance, message_item, response_object
from recipes.environments.instances import VERIFIERS, servers_of
from recipes.environments.scoring.clients import HttpVerifier
from recipes.errors import InputError, Problem, RunError
from recipes.exact_json import dumps, loads
from recipes.types import Row
from tools.command_line import exit_status, positive
from tools.environments.check.target import EXAMPLES, Target, Workshop

TEXT = "I think that the answer is \\boxed{B}. <answer>12</answer>"
SECONDS = 60.0  # of one verdict at most
AT_ONCE, AT_ONCE_NAME = 4096, "mcqa"
PER_SECOND_LIMIT, SHARE_LIMIT = 1000.0, 0.8  # verdicts; of what the plain program reaches, where that is less
STALL_LIMIT = 0.2  # seconds
PLAIN_CONNECTIONS = 64
_TICK_SECONDS = 0.005
HEADS = ("environment", "function /s", "in process /s", "p99 ms", "over HTTP /s", "p99 ms", "no verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast one way gave its verdicts."""

    per_second: float
    p99: float  # seconds
    num_failed: int  # no verdict


Verify = Callable[[Row, Response], Awaitable[Verdict | NoVerdict]]


async def measure(verify: Verify, rows: Sequence[Row], *, count: int, concurrency: int) -> Speed:
    """Verify `count` answers, `concurrency` at a time; no two are alike, so that none comes from a cache."""
    seconds, failed = list[float](), list[int]()
    answers = enumerate([response_object([message_item(f"{TEXT} {number}")]) for number in range(count)])

    async def work() -> None:
        for number, answer in answers:
            start = time.monotonic()
            verdict = await verify(rows[number % len(rows)], answer)
            seconds.append(time.monotonic() - start)
            failed.extend([number] * isinstance(verdict, NoVerdict))

    await verify(rows[0], response_object([message_item(TEXT)]))  # starts what is started once
    begin = time.monotonic()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    end = time.monotonic()
    return Speed(per_second=count / (end - begin), p99=sorted(seconds)[int(0.99 * (count - 1))], num_failed=len(failed))


def function_alone(name: str, settings: Mapping[str, Any], rows: Sequence[Row], *, count: int) -> float:
    """Return how often a second a verifier's functions run, one after the other."""
    verifier = VERIFIERS[name]
    read = servers_of({name: {"resources_servers": {name: settings}}})[name].settings
    answers = [response_object([message_item(f"{TEXT} {number}")]) for number in range(count)]
    start = time.monotonic()
    for number, answer in enumerate(answers):
        advance(verifier.score(answer, verifier.parse_task(rows[number % len(rows)], read)), [])
    return count / (time.monotonic() - start)


@contextmanager
def served(target: Target) -> Iterator[str]:
    """Serve a verifier in a process of its own; yields its address."""
    command = [sys.executable, "-m", "tools.environments.serve_env", "--name", target.name, "--port", "0"]
    command += [f"--set={key}={orjson.dumps(value).decode()}" for key, value in target.settings.items()]
    command += ["--judge-url", target.judge.url] if target.asks_judge else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace") as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise InputError(Problem(where=target.name, wrong="its server did not start", fix="see above why"))
            yield found.group()
        finally:
            process.terminate()
            process.wait()


async def one(workshop: Workshop, name: str, rows: Sequence[Row], *, count: int, concurrency: int) -> list[str]:
    """Return the line of one environment."""
    target = workshop.own(name, {}, seconds=SECONDS)
    asks = target.asks_judge or VERIFIERS[name].needs_sandbox
    alone = "" if asks else f"{function_alone(name, target.settings, rows, count=count):.0f}"
    here = await measure(target.scorer.verify, rows, count=count, concurrency=concurrency)
    with served(target) as url:
        client = HttpVerifier(name=name, url=url, timeout_seconds=SECONDS, http=workshop.http)
        there = await measure(client.verify, rows, count=count, concurrency=concurrency)
    ways = [text for way in (here, there) for text in (f"{way.per_second:.0f}", f"{1000 * way.p99:.0f}")]
    return [name, alone, *ways, str(here.num_failed + there.num_failed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What became of many verifications that were asked for at once."""

    count: int
    per_second: float
    plain_per_second: float  # of a program that only sends and receives
    stall: float  # longest time, in seconds, for which the client's event loop did nothing else
    num_failed: int  # no verdict

    @property
    def least_per_second(self) -> float:
        """Return the speed that our client must reach."""
        return min(PER_SECOND_LIMIT, SHARE_LIMIT * self.plain_per_second)

    @property
    def is_kept(self) -> bool:
        """Whether both limits are kept and every verification gave a verdict."""
        is_fast = self.per_second >= self.least_per_second
        return is_fast and self.stall <= STALL_LIMIT and not self.num_failed

    def lines(self) -> list[str]:
        """Return one line per limit, with its verdict."""
        speed = "ok" if self.per_second >= self.least_per_second else "BELOW"
        stall = "ok" if self.stall <= STALL_LIMIT else "ABOVE"
        return [
            f"{self.count} at once over HTTP: {self.per_second:.0f} verdicts a second, at least"
            f" {self.least_per_second:.0f}: {speed} (a plain program: {self.plain_per_second:.0f});"
            f" {self.num_failed} without a verdict",
            f"longest stall of the client's event loop: {self.stall:.3f} s, at most {STALL_LIMIT:g} s: {stall}",
        ]


async def burst(url: str, verify: Verify, rows: Sequence[Row], *, count: int) -> Burst:
    """Ask for `count` verdicts at once, then have a plain program send as many requests to the same server."""
    await measure(verify, rows, count=PLAIN_CONNECTIONS, concurrency=PLAIN_CONNECTIONS)  # makes what is made once
    stalls: list[float] = []
    ticking = asyncio.create_task(_note_stalls(stalls))
    speed = await measure(verify, rows, count=count, concurrency=count)
    ticking.cancel()
    await asyncio.wait([ticking])
    bodies = [
        dumps({**row, "response": response_object([message_item(f"{TEXT} {number}")])})
        for number, row in zip(range(PLAIN_CONNECTIONS), itertools.cycle(rows), strict=False)
    ]
    return Burst(
        count=count,
        per_second=speed.per_second,
        plain_per_second=await plain_speed(f"{url}/verify", bodies, count=count),
        stall=max(stalls, default=0.0),
        num_failed=speed.num_failed,
    )


async def _note_stalls(stalls: list[float]) -> None:
    """Add by how much each short sleep was longer than asked for, also the one in which this is cancelled."""
    while True:
        start = time.monotonic()
        try:
            await asyncio.sleep(_TICK_SECONDS)
        finally:
            stalls.append(time.monotonic() - start - _TICK_SECONDS)


async def plain_speed(url: str, bodies: Sequence[bytes], *, count: int) -> float:
    """Return the replies a second to `count` requests on kept connections; raises `RunError` for another status."""
    where = urlsplit(url)
    numbers = iter(range(count))

    async def work(body: bytes) -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = f"POST {where.path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        for _ in numbers:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            size = re.search(rb"content-length: (\d+)", answer.lower())
            if size is None or not answer.startswith(b"HTTP/1.1 200"):
                raise RunError(f"{url} answered {answer[:200]!r}")
            await reader.readexactly(int(size[1]))
        writer.close()

    begin = time.monotonic()
    await asyncio.gather(*map(work, bodies))
    return count / (time.monotonic() - begin)


async def _print_burst(workshop: Workshop, examples: Path) -> bool:
    """Measure and print a burst; returns whether its limits are kept."""
    rows = _rows(examples, AT_ONCE_NAME)
    with served(workshop.own(AT_ONCE_NAME, {}, seconds=SECONDS)) as url:
        client = HttpVerifier(name=AT_ONCE_NAME, url=url, timeout_seconds=SECONDS, http=workshop.http)
        found = await burst(url, client.verify, rows, count=AT_ONCE)
    print(*found.lines(), sep="\n", flush=True)
    return found.is_kept


@exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per environment and one per limit; return 0 when the limits are kept, else 1."""
    parser = argparse.ArgumentParser(prog="bench.verifiers", description=__doc__.partition("\n")[0])
    parser.add_argument("--names", nargs="*", default=sorted(VERIFIERS), choices=sorted(VERIFIERS), metavar="NAME")
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="directory of example rows")
    parser.add_argument("--count", type=positive, default=400, help="verdicts of each way")
    parser.add_argument("--concurrency", type=positive, default=64, help="verdicts that are asked for at once")
    options = parser.parse_args(arguments)
    return asyncio.run(_print(options))


async def _print(options: argparse.Namespace) -> int:
    for name in options.names:
        _rows(options.examples, name)  # before anything is measured
    workshop, is_kept, num_measured = Workshop(examples=options.examples), True, 0
    print(" ".join(f"{head:>14}" for head in HEADS), flush=True)
    try:
        for name in options.names:
            rows = _rows(options.examples, name)
            try:
                line = await one(workshop, name, rows, count=options.count, concurrency=options.concurrency)
            except InputError as error:
                print(f"{name}: not measured: {error}")
                continue
            print(" ".join(f"{text[:14]:>14}" for text in line), flush=True)
            num_measured += 1
        if AT_ONCE_NAME in options.names:
            is_kept = await _print_burst(workshop, options.examples)
    finally:
        await workshop.close()
    return 0 if is_kept and num_measured else 1


def _rows(examples: Path, name: str) -> list[Row]:
    """Return the example rows of an environment; raises `InputError` where there is none."""
    path = examples / f"{name}.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if rows := [loads(line) for line in lines if line.strip()]:
        return rows
    raise InputError(Problem(where=str(path), wrong=f"there is no row of {name}", fix="give --examples DIRECTORY"))


if __name__ == "__main__":
    sys.exit(main())
