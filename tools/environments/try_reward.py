"""Try a reward of your own on answers that should earn little: `make try-reward REWARD=my_reward.py ROWS=my.jsonl`.

    python -m tools.environments.try_reward --reward FILE --rows DIR/train-split.jsonl [--count 12]

Each row is answered with its own `expected_answer` where it has one, with nothing, its prompt, another row's answer, a
zero and a long text. The table says what each kind of answer earned. Exit status 2 where the reward fails, and 1 where
right answers earn no more on average than another kind does: that is said, and yours to judge.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from recipes import exact_json
from recipes.environments.contract.verifier import Verdict, message_item, response_object
from recipes.environments.instances import VERIFIERS
from recipes.environments.scoring.clients import InProcessVerifier
from recipes.environments.scoring.pool import ScoringPool
from recipes.errors import InputError, Problem
from tools.command_line import exit_status, positive

RIGHT = "the row's own answer"
SECONDS = 60.0  # for one score
LONG = "word " * 20_000

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What one kind of answer earned: a reward per row, in the order of the rows that can be answered so."""

    kind: str
    rewards: tuple[float, ...]


def answers_to(row: Row, other: Row) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of the answers that a row is tried with; `other` is another row."""
    if "expected_answer" in row:
        yield RIGHT, str(row["expected_answer"])
    yield "an empty answer", ""
    yield "an echo of the prompt", prompt_of(row)
    if "expected_answer" in other and other["expected_answer"] != row.get("expected_answer"):
        yield "the answer of another row", str(other["expected_answer"])
    yield "0", "0"
    yield "a long text", LONG


def prompt_of(row: Row) -> str:
    """Return the text of a row's last message."""
    asked = row["responses_create_params"]["input"]
    return asked if isinstance(asked, str) else str(asked[-1].get("content", ""))


async def try_reward(file: Path, rows: Sequence[Row]) -> list[Tried]:
    """Return what each kind of answer earned; raises `InputError` for a reward that gives no verdict."""
    verifier, pool = VERIFIERS["reward"], ScoringPool(num_workers=1)
    settings = verifier.settings(file=str(file.resolve()))
    client = InProcessVerifier(name="reward", verifier=verifier, settings=settings, pool=pool, timeout_seconds=SECONDS)
    earned: dict[str, list[float]] = {}
    try:
        for number, row in enumerate(rows):
            for kind, text in answers_to(row, rows[(number + 1) % len(rows)]):
                verdict = await client.verify(row, response_object([message_item(text)]))
                if not isinstance(verdict, Verdict):
                    where = f"{kind}, row {number + 1}"
                    raise InputError(Problem(where=where, wrong=verdict.reason, fix=f"correct {file}"))
                earned.setdefault(kind, []).append(verdict.reward)
    finally:
        pool.close()
    return [Tried(kind=kind, rewards=tuple(rewards)) for kind, rewards in earned.items()]


def lines_about(tried: Sequence[Tried]) -> list[str]:
    """Return the table, and a line for each kind of answer that earns as much as the best one does."""
    best = max(max(one.rewards) for one in tried)
    width = max(len(one.kind) for one in tried)
    lines = [f"{'answer':<{width}}  mean reward  lowest  highest"]
    for one in tried:
        numbers = f"{statistics.fmean(one.rewards):>11.3f}  {min(one.rewards):>6.3g}  {max(one.rewards):>7.3g}"
        lines.append(f"{one.kind:<{width}}  {numbers}")
    for one in tried:
        paid = sum(reward >= best for reward in one.rewards)
        if one.kind != RIGHT and paid and best > min(min(other.rewards) for other in tried):
            lines.append(f"your reward pays {one.kind} in full: {paid} of {len(one.rewards)} rows")
    return lines


def teaches(tried: Sequence[Tried]) -> bool:
    """Return whether the right answers earn more than the others; True where no row says what is right."""
    means = {one.kind: statistics.fmean(one.rewards) for one in tried}
    others = [mean for kind, mean in means.items() if kind != RIGHT]
    return RIGHT not in means or means[RIGHT] > max(others)


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Print what the reward pays; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.environments.try_reward", description=__doc__.split("\n")[0])
    parser.add_argument("--reward", type=Path, required=True, help="Python file with score(response, row)")
    parser.add_argument("--rows", type=Path, required=True, help="rows, one JSON object per line")
    parser.add_argument("--count", type=positive, default=12, help="rows that are tried")
    options = parser.parse_args(argv)
    with options.rows.open("rb") as file:
        rows = [exact_json.loads(line) for line in islice(file, options.count)]
    tried = asyncio.run(try_reward(options.reward, rows))
    print("\n".join(lines_about(tried)))
    if teaches(tried):
        return 0
    print(f"{options.reward}: right answers earn no more than the others do: nothing would be learned", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
