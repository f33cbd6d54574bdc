"""`python -m tools.bench.verifiers` (`make bench-verifiers`): how many verdicts a second each environment gives.

Three ways: the verifier's function alone, in this process as a run calls it, and over HTTP from a server of its own.
The function alone is measured where a verifier asks no judge and runs no program. Judges are a server on this machine
that answers at once, so the figures are those of everything but the judge's model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from recipes.environments.contract.asking import advance
from recipes.environments.contract.responses import message_item, response_object
from recipes.environments.contract.verdict import NoVerdict, Response, Verdict
from recipes.environments.registry import VERIFIERS
from recipes.environments.scoring.clients import HttpVerifier
from recipes.errors import InputError, Problem
from recipes.types import Row
from tools.command_line import exit_status, positive
from tools.env_check.target import Target, Workshop

EXAMPLES = Path("../shared/gym_examples")  # one file per environment, `NAME.jsonl`
TEXT = "I think that the answer is \\boxed{B}. <answer>12</answer>"
SECONDS = 60.0  # of one verdict at most
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
    numbers, seconds, failed = itertools.count(), list[float](), list[int]()

    async def work() -> None:
        for number in numbers:
            if number >= count:
                return
            answer = response_object([message_item(f"{TEXT} {number}")])
            start = time.monotonic()
            verdict = await verify(rows[number % len(rows)], answer)
            seconds.append(time.monotonic() - start)
            failed.extend([number] * isinstance(verdict, NoVerdict))

    await verify(rows[0], response_object([message_item(TEXT)]))  # starts what is started once
    begin = time.monotonic()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    end = time.monotonic()
    return Speed(per_second=count / (end - begin), p99=sorted(seconds)[int(0.99 * (count - 1))], num_failed=len(failed))


def function_alone(name: str, settings: dict[str, Any], rows: Sequence[Row], *, count: int) -> float:
    """Return how often a second a verifier's functions run, one after the other."""
    verifier = VERIFIERS[name]
    answers = [response_object([message_item(f"{TEXT} {number}")]) for number in range(count)]
    start = time.monotonic()
    for number, answer in enumerate(answers):
        advance(verifier.score(answer, verifier.parse_task(rows[number % len(rows)], settings)), [])
    return count / (time.monotonic() - start)


@contextmanager
def served(target: Target) -> Iterator[str]:
    """Serve a verifier in a process of its own; yields its address."""
    command = [sys.executable, "-m", "tools.serve_env", "--name", target.name, "--port", "0"]
    command += [f"--set={key}={orjson.dumps(value).decode()}" for key, value in target.settings.items()]
    command += ["--judge-url", target.judge.url] if target.asks_judge else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
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
    settings = dict(target.settings)
    alone = "" if asks else f"{function_alone(name, settings, rows, count=count):.0f}"
    here = await measure(target.scorer.verify, rows, count=count, concurrency=concurrency)
    with served(target) as url:
        client = HttpVerifier(name=name, url=url, timeout_seconds=SECONDS, http=workshop.http)
        there = await measure(client.verify, rows, count=count, concurrency=concurrency)
    ways = [text for way in (here, there) for text in (f"{way.per_second:.0f}", f"{1000 * way.p99:.0f}")]
    return [name, alone, *ways, str(here.num_failed + there.num_failed)]


@exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per environment."""
    parser = argparse.ArgumentParser(prog="bench.verifiers", description=__doc__.partition("\n")[0])
    parser.add_argument("--names", nargs="*", default=sorted(VERIFIERS), choices=sorted(VERIFIERS), metavar="NAME")
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="directory of example rows")
    parser.add_argument("--count", type=positive, default=400, help="verdicts of each way")
    parser.add_argument("--concurrency", type=positive, default=64, help="verdicts that are asked for at once")
    options = parser.parse_args(arguments)
    return asyncio.run(_print(options))


async def _print(options: argparse.Namespace) -> int:
    workshop = Workshop(examples=options.examples)
    print(" ".join(f"{head:>14}" for head in HEADS), flush=True)
    try:
        for name in options.names:
            path = options.examples / f"{name}.jsonl"
            if not path.is_file():
                print(f"{name}: not measured, there is no {path}")
                continue
            rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
            try:
                line = await one(workshop, name, rows, count=options.count, concurrency=options.concurrency)
            except InputError as error:
                print(f"{name}: not measured: {error}")
                continue
            print(" ".join(f"{text[:14]:>14}" for text in line), flush=True)
    finally:
        await workshop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
