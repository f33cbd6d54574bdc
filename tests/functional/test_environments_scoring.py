"""Scoring workers: deadlines, crashes, the cache, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from below import below
from speed import patiently

from recipes.environments.contract.verifier import NoVerdict, Verdict, message_item
from recipes.environments.instances import VERIFIERS
from recipes.environments.scoring.jail import Jail
from recipes.environments.scoring.pool import ScoringPool
from recipes.environments.scoring.process import ScoringProcess
from recipes.types import RolloutStatus

pytestmark = pytest.mark.functional

# The scorer matches the row's own pattern in 2 ** 40 tries, inside one call that holds the GIL.
PATTERN_ROW = {
    "options": [{"A": "x"}, {"B": "y"}],
    "expected_answer": "B",
    "template_metadata": {"output_regex": "(a+)+$"},
}
ENDLESS_TEXT = "a" * 40 + "!"
ENDLESS = {"output": [message_item(ENDLESS_TEXT)]}


def pattern_task() -> Any:
    return VERIFIERS["mcqa"].parse_task(PATTERN_ROW, VERIFIERS["mcqa"].settings())


def math_task(expected: str = "5") -> Any:
    return VERIFIERS["math_with_judge"].parse_task(
        {"question": "q", "expected_answer": expected}, VERIFIERS["math_with_judge"].settings()
    )


def boxed(text: str) -> dict[str, Any]:
    return {"output": [message_item(f"\\boxed{{{text}}}")]}


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    made = ScoringPool(num_workers=1, cpu_seconds=1.5)
    yield made
    made.close()


def workers_of(parent: int) -> list[int]:
    """Return the ids of a process's loaders and scorers, nearest first."""
    return [process for process in below(parent) if is_running(process) and b"scoring.worker" in command_of(process)]


def command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_scores_and_remembers(pool: ScoringPool) -> None:
    assert (await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))) == Verdict(
        reward=1.0,
        reason="5 equals 5",
        metrics={"library_reward": 1.0},
        details={"extracted_answer": "5"},
    )
    pool.close()  # from here on only what is remembered can be answered
    assert isinstance(await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5")), Verdict)
    with pytest.raises(RuntimeError):
        await pool.score(VERIFIERS["math_with_judge"], math_task("6"), boxed("5"))


async def test_an_endless_score_has_no_verdict_and_only_its_scorer_is_replaced(pool: ScoringPool) -> None:
    assert await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))
    before_keys = set(pool._cache)
    *loaders, before = workers_of(os.getpid())
    verdict = await pool.score(VERIFIERS["mcqa"], pattern_task(), ENDLESS)
    assert isinstance(verdict, NoVerdict)
    assert verdict.reason == "mcqa: scoring used more than 1.5 s of processor time"
    assert not pool._cache.keys() - before_keys
    after = await pool.score(VERIFIERS["math_with_judge"], math_task("7"), boxed("7"))
    assert isinstance(after, Verdict)
    assert after.reward == 1.0
    assert workers_of(os.getpid())[:-1] == loaders
    assert workers_of(os.getpid())[-1] != before


@pytest.mark.parametrize("which", [0, -1], ids=["loader", "scorer"])
async def test_a_process_that_dies_once_is_replaced(pool: ScoringPool, which: int) -> None:
    await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))
    os.kill(workers_of(os.getpid())[which], signal.SIGKILL)
    verdict = await pool.score(VERIFIERS["math_with_judge"], math_task("7"), boxed("7"))
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 1.0


async def test_a_signal_for_the_driver_does_not_reach_the_processes(pool: ScoringPool) -> None:
    """`scancel --signal=USR1` sends it to every process of the driver's step."""
    assert await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))
    before = below(os.getpid())
    for process in before:
        os.kill(process, signal.SIGUSR1)
    assert await pool.score(VERIFIERS["math_with_judge"], math_task("7"), boxed("7"))
    assert set(before) <= set(below(os.getpid()))


async def test_a_process_that_keeps_dying_is_no_verdict(pool: ScoringPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jail, "command", lambda *_: ["/bin/sh", "-c", "echo out of order >&2; kill -9 $$"])
    verdict = await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))
    assert isinstance(verdict, NoVerdict)
    assert verdict.status is RolloutStatus.ENV_FAILED
    assert "the scoring process died (exit status -9: out of order) (3 attempts)" in verdict.reason


async def test_a_busy_machine_costs_no_reward(pool: ScoringPool) -> None:
    """What is too slow is decided by processor time: a scorer that gets none is not blamed."""
    await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))
    scorer = workers_of(os.getpid())[-1]
    os.kill(scorer, signal.SIGSTOP)
    scoring = asyncio.create_task(pool.score(VERIFIERS["math_with_judge"], math_task("7"), boxed("7")))
    await asyncio.sleep(2.0)  # longer than cpu_seconds
    os.kill(scorer, signal.SIGCONT)
    assert (await scoring).reason == "7 equals 7"


async def test_a_score_that_is_stopped_on_its_way_loses_no_reward(pool: ScoringPool) -> None:
    """The library's own limits are five seconds on the clock, which also run while a process gets no processor."""
    await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))
    scorer = workers_of(os.getpid())[-1]

    verdicts: list[Any] = []
    stopped = asyncio.Event()

    async def all_right() -> None:
        while not stopped.is_set():
            number = 2 * len(verdicts) + 1
            verdicts.append(
                await pool.score(
                    VERIFIERS["math_with_judge"],
                    math_task(f"x^2+\\frac{{{number}}}{{7}}"),
                    boxed(f"\\frac{{{number}}}{{7}}+x^2"),
                )
            )

    scoring = asyncio.create_task(all_right())
    for seconds in (6.0, 0.1):
        await asyncio.sleep(0.4)  # into the middle of a score
        os.kill(scorer, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(scorer, signal.SIGCONT)
    stopped.set()
    await scoring
    assert [verdict.reason for verdict in verdicts if getattr(verdict, "reward", 0.0) != 1.0] == []
    assert workers_of(os.getpid())[-1] == scorer, "it was replaced"


async def test_waiting_for_a_free_process_is_not_scoring(pool: ScoringPool) -> None:
    await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))
    scorer = workers_of(os.getpid())[-1]
    os.kill(scorer, signal.SIGSTOP)
    first = asyncio.create_task(pool.score(VERIFIERS["math_with_judge"], math_task("6"), boxed("6"), seconds=2.0))
    await asyncio.sleep(0.2)
    second = asyncio.create_task(pool.score(VERIFIERS["math_with_judge"], math_task("7"), boxed("7"), seconds=30.0))
    late = await first
    assert isinstance(late, NoVerdict), "no time on the clock is a failure of the machine, not of the answer"
    assert "no score within 2 s" in late.reason
    assert (await second).reason == "7 equals 7"


async def test_loading_is_tried_again_and_then_gives_no_verdict(
    pool: ScoringPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    load = ScoringProcess.load

    def slow_twice(process: ScoringProcess, verifier: Any, seconds: float) -> None:
        tried.append(seconds)
        load(process, verifier, 0.01 if len(tried) <= too_slow else seconds)

    monkeypatch.setattr(ScoringProcess, "load", slow_twice)
    too_slow = 2
    assert (await pool.score(VERIFIERS["math_with_judge"], math_task(), boxed("5"))).reason == "5 equals 5"
    pool._processes[0].stop()
    tried.clear()
    too_slow = 3
    verdict = await pool.score(VERIFIERS["math_with_judge"], math_task("6"), boxed("6"))
    assert isinstance(verdict, NoVerdict)
    assert verdict.reason.endswith("could not be loaded: not within 60 s (3 attempts)")


async def test_an_error_in_a_verifier_is_no_verdict(pool: ScoringPool) -> None:
    verdict = await pool.score(VERIFIERS["mcqa"], math_task(), boxed("5"))  # a task that is not its own
    assert isinstance(verdict, NoVerdict)
    assert "mcqa: TypeError" in verdict.reason


async def test_close_ends_a_score_in_flight(pool: ScoringPool) -> None:
    waiting = asyncio.create_task(pool.score(VERIFIERS["mcqa"], pattern_task(), ENDLESS))
    while not workers_of(os.getpid()):
        await asyncio.sleep(0.05)
    await asyncio.to_thread(pool.close)
    assert isinstance(await waiting, NoVerdict | Verdict)
    assert workers_of(os.getpid()) == []


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """The kernel ends them, also the one that is stuck in a C call."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, threading, time\n"
        "from recipes.environments.instances import VERIFIERS\n"
        "from recipes.environments.contract.verifier import message_item\n"
        "from recipes.environments.scoring.pool import ScoringPool\n"
        f"task = VERIFIERS['mcqa'].parse_task({PATTERN_ROW!r}, VERIFIERS['mcqa'].settings())\n"
        "pool = ScoringPool(num_workers=2, cpu_seconds=30.0)\n"
        "async def score(text):\n"
        "    return await pool.score(VERIFIERS['mcqa'], task, {'output': [message_item(text)]})\n"
        "async def both():\n"
        "    await asyncio.gather(score('9'), score('8'))\n"
        f"    stuck = asyncio.create_task(score({ENDLESS_TEXT!r}))\n"
        "    await asyncio.sleep(0.3)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "asyncio.run(both())\n",
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        workers = workers_of(parent.pid)
        assert len(workers) >= 4  # two loaders, two scorers
        parent.kill()
        parent.wait(timeout=patiently(20))
    deadline = time.monotonic() + patiently(20.0)
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a scoring worker outlived its parent"
        time.sleep(0.1)
