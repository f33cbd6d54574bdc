"""What a long rollout costs between the agent and the engine's input: CPU seconds of both processes, engine apart.

Several such rollouts run at once, as in stage 2.2, and their cost is divided among them. With one alone most of what is
measured would be the idle threads of Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from recipes.rollouts.group import PolicyClient
from recipes.types import Sampling
from tools.bench.scale_step import MODEL_TOKENS

if TYPE_CHECKING:
    from recipes.generation.generation import Generation

NUM_SESSIONS, NUM_TURNS, NUM_TOKENS = 8, 200, 100_000
LIMIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCost:
    """CPU seconds of one rollout of `NUM_TURNS` turns and about `NUM_TOKENS` tokens, beside others like it."""

    num_tokens: int
    client_seconds: float
    engine_seconds: float

    def __str__(self) -> str:
        total = self.client_seconds + self.engine_seconds
        return (
            f"each of {NUM_SESSIONS} sessions at once, of {NUM_TURNS} turns and {self.num_tokens} tokens, costs"
            f" {total:.2f} s of CPU (at most {LIMIT_SECONDS:g}): {self.client_seconds:.2f} s where the agent is,"
            f" {self.engine_seconds:.2f} s where the engine is"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the limit."""
        return {**asdict(self), "limit_seconds": LIMIT_SECONDS}


def measure_session(generation: Generation, engines: Sequence[Any], engine_cpu: Callable[[], float]) -> SessionCost:
    """Run rollouts as an agent of tools does; `engine_cpu()` returns the CPU seconds of the engines' processes."""
    import ray

    per_turn = NUM_TOKENS // NUM_TURNS
    ray.get([engine.set_mean.remote(per_turn / 2) for engine in engines], timeout=60)
    asyncio.run(_converse_at_once(generation, 5, per_turn))  # makes what is made once
    began, began_engine = time.process_time(), engine_cpu()
    num_tokens = asyncio.run(_converse_at_once(generation, NUM_TURNS, per_turn))
    client, engine = time.process_time() - began, engine_cpu() - began_engine
    return SessionCost(
        num_tokens=num_tokens // NUM_SESSIONS,
        client_seconds=client / NUM_SESSIONS,
        engine_seconds=engine / NUM_SESSIONS,
    )


async def _converse_at_once(generation: Generation, num_turns: int, per_turn: int) -> int:
    """Return the tokens of all rollouts together."""
    rollouts = [_converse(generation, num_turns, per_turn, number) for number in range(NUM_SESSIONS)]
    return sum(await asyncio.gather(*rollouts))


async def _converse(generation: Generation, num_turns: int, per_turn: int, prompt: int) -> int:
    """Take turns; what a tool answers brings each turn to the same length."""
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=per_turn)
    client = PolicyClient(generation, sampling, MODEL_TOKENS, affinity=prompt, rollout=0)
    seen: tuple[int, ...] = ()
    for turn in range(num_turns):
        new = tuple(range(1000, 1000 + turn * per_turn - len(seen))) or (1,)
        completion = await client.generate(seen + new, max_tokens=per_turn)
        seen += new + completion.token_ids
    client.close()
    return len(seen)
