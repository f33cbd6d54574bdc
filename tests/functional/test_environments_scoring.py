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

from recipes.environments.contract.responses import message_item
from recipes.environments.contract.verdict import NoVerdict, Verdict
from recipes.environments.registry import VERIFIERS
from recipes.environments.scoring.pool import ScoringPool
from recipes.types import RolloutStatus

pytestmark = pytest.mark.functional

# the scorer evaluates the answer as an expression: this one outlives every limit, inside one call that holds the GIL
COUNTDOWN = {"source_dataset": "countdown", "numbers": [9], "target": 9}
ENDLESS = {"output": [message_item("9**9**9**9")]}


def countdown_task() -> Any:
    row = {"question": "q", "answer": "9", "metadata": COUNTDOWN}
    return VERIFIERS["reasoning_gym"].parse_task(row, {})


def math_task(expected: str = "5") -> Any:
    return VERIFIERS["math_with_judge"].parse_task({"question": "q", "expected_answer": expected}, {})


def boxed(text: str) -> dict[str, Any]:
    return {"output": [message_item(f"\\boxed{{{text}}}")]}


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    made = ScoringPool(num_workers=1, limit_seconds=1.5)
    yield made
    made.close()


def workers_of(parent: int) -> list[int]:
    """Return the ids of the scoring workers a process has."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if int(status[1]) == parent and b"scoring.worker" in command:
            found.append(int(entry.name))
    return found


async def test_scores_and_remembers(pool: ScoringPool) -> None:
    assert (await pool.score("math_with_judge", math_task(), boxed("10/2"))) == Verdict(
        reward=1.0,
        reason="5 equals 5",
        metrics={"library_reward": 1.0},
        details={"extracted_answer": "5"},
    )
    pool.close()  # from here on only what is remembered can be answered
    assert isinstance(await pool.score("math_with_judge", math_task(), boxed("10/2")), Verdict)
    with pytest.raises(RuntimeError):
        await pool.score("math_with_judge", math_task("6"), boxed("10/2"))


async def test_an_endless_score_earns_nothing_and_its_worker_is_replaced(pool: ScoringPool) -> None:
    start = time.monotonic()
    assert await pool.score("math_with_judge", math_task(), boxed("5"))
    (before,) = workers_of(os.getpid())
    verdict = await pool.score("reasoning_gym", countdown_task(), ENDLESS)
    assert verdict == Verdict(reward=0.0, reason="no score within 1.5 s")
    after = await pool.score("math_with_judge", math_task("7"), boxed("7"))
    assert isinstance(after, Verdict)
    assert after.reward == 1.0
    assert workers_of(os.getpid()) not in ([], [before])
    assert time.monotonic() - start < 60.0


async def test_a_worker_that_crashes_once_is_replaced(pool: ScoringPool) -> None:
    await pool.score("math_with_judge", math_task(), boxed("5"))
    (worker,) = workers_of(os.getpid())
    os.kill(worker, signal.SIGKILL)
    verdict = await pool.score("math_with_judge", math_task("7"), boxed("7"))
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 1.0


async def test_a_worker_that_keeps_dying_is_no_verdict(pool: ScoringPool) -> None:
    async def kill_workers() -> None:
        while True:
            for worker in workers_of(os.getpid()):
                os.kill(worker, signal.SIGKILL)
            await asyncio.sleep(0.01)

    killer = asyncio.create_task(kill_workers())
    verdict = await pool.score("math_with_judge", math_task(), boxed("5"))
    killer.cancel()
    assert isinstance(verdict, NoVerdict)
    assert verdict.status is RolloutStatus.ENV_FAILED
    assert "the scoring worker died (exit status -9)" in verdict.reason


async def test_an_error_in_a_verifier_is_no_verdict(pool: ScoringPool) -> None:
    verdict = await pool.score("structured_outputs", "no task", boxed("5"))
    assert isinstance(verdict, NoVerdict)
    assert "structured_outputs: AttributeError" in verdict.reason


async def test_close_ends_a_score_in_flight(pool: ScoringPool) -> None:
    waiting = asyncio.create_task(pool.score("reasoning_gym", countdown_task(), ENDLESS))
    while not workers_of(os.getpid()):
        await asyncio.sleep(0.05)
    await asyncio.to_thread(pool.close)
    assert isinstance(await waiting, NoVerdict | Verdict)
    assert workers_of(os.getpid()) == []


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """An idle worker sees its socket close; one that is stuck in a C call is ended by the kernel's timer."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, threading, time\n"
        "from recipes.environments.registry import VERIFIERS\n"
        "from recipes.environments.contract.responses import message_item\n"
        "from recipes.environments.scoring.pool import ScoringPool\n"
        f"row = {{'question': 'q', 'answer': '9', 'metadata': {COUNTDOWN!r}}}\n"
        "task = VERIFIERS['reasoning_gym'].parse_task(row, {})\n"
        "pool = ScoringPool(num_workers=2, limit_seconds=1.0)\n"
        "async def score(text):\n"
        "    return await pool.score('reasoning_gym', task, {'output': [message_item(text)]})\n"
        "async def both():\n"
        "    await asyncio.gather(score('9'), score('8'))\n"
        "    stuck = asyncio.create_task(score('9**9**9**9'))\n"
        "    await asyncio.sleep(0.3)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "asyncio.run(both())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        workers = workers_of(parent.pid)
        assert len(workers) == 2
        parent.kill()
        parent.wait(timeout=20)
    deadline = time.monotonic() + 60.0  # the timer counts processor time, which a busy machine gives slowly
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a scoring worker outlived its parent"
        time.sleep(0.1)
