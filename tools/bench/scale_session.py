"""What a long rollout costs between the agent and the engine's input: CPU seconds of both processes, engine apart."""

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

NUM_TURNS, NUM_TOKENS = 200, 100_000
LIMIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCost:
    """CPU seconds of one rollout of `NUM_TURNS` turns and about `NUM_TOKENS` tokens."""

    num_tokens: int
    client_seconds: float
    engine_seconds: float

    def __str__(self) -> str:
        total = self.client_seconds + self.engine_seconds
        return (
            f"a session of {NUM_TURNS} turns and {self.num_tokens} tokens costs {total:.2f} s of CPU (at most"
            f" {LIMIT_SECONDS:g}): {self.client_seconds:.2f} s where the agent is, {self.engine_seconds:.2f} s where"
            " the engine is"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the limit."""
        return {**asdict(self), "limit_seconds": LIMIT_SECONDS}


def measure_session(generation: Generation, engines: Sequence[Any], engine_cpu: Callable[[], float]) -> SessionCost:
    """Run one rollout as an agent of tools does; `engine_cpu()` returns the CPU seconds of the engines' processes."""
    import ray

    per_turn = NUM_TOKENS // NUM_TURNS
    ray.get([engine.set_mean.remote(per_turn / 2) for engine in engines], timeout=60)
    asyncio.run(_converse(generation, 5, per_turn))  # makes what is made once
    began, began_engine = time.process_time(), engine_cpu()
    num_tokens = asyncio.run(_converse(generation, NUM_TURNS, per_turn))
    client = time.process_time() - began
    return SessionCost(num_tokens=num_tokens, client_seconds=client, engine_seconds=engine_cpu() - began_engine)


async def _converse(generation: Generation, num_turns: int, per_turn: int) -> int:
    """Take turns; what a tool answers brings each turn to the same length."""
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=per_turn)
    client = PolicyClient(generation, sampling, MODEL_TOKENS, affinity=num_turns, rollout=0)
    seen: tuple[int, ...] = ()
    answered = 0
    for turn in range(num_turns):
        new = tuple(range(1000, 1000 + turn * per_turn - len(seen))) or (1,)
        completion = await client.generate(seen + new, max_tokens=per_turn)
        seen += new + completion.token_ids
        answered += len(completion.token_ids)
    client.close()
    return len(seen)
