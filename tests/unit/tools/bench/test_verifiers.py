"""What the bench of verifiers counts."""

from __future__ import annotations

import asyncio

from recipes.environments.contract.responses import last_message_text
from recipes.environments.contract.verdict import NoVerdict, Response, Verdict, env_failed
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
