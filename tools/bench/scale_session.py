"""What a long rollout costs from the agent to the engine's input: CPU seconds of both processes, the model apart.

Several such rollouts run at once, as in stage 2.2, and their cost is divided among them. With one alone most of what is
measured would be the idle threads of Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recipes.environments.agents.conversation import Conversation
from recipes.environments.agents.episode import Episode
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.rollouts.group import PolicyClient, Sampler
from recipes.token_ids import TokenIds
from recipes.types import Completion, Sampling, VersionSpan
from tools.bench.scale_step import MODEL_TOKENS

if TYPE_CHECKING:
    from recipes.generation.generation import Generation

NUM_SESSIONS, NUM_TURNS, NUM_TOKENS = 8, 200, 100_000
LIMIT_SECONDS = 0.5
_WORDS = "The file has a line that nobody reads. " * 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCost:
    """CPU seconds of one rollout of `NUM_TURNS` turns and about `NUM_TOKENS` tokens, beside others like it."""

    num_tokens: int
    agent_seconds: float  # to render, to tokenize and to read what is said
    client_seconds: float
    engine_seconds: float

    @property
    def seconds(self) -> float:
        """Return the cost in both processes, the agent's own part included."""
        return self.agent_seconds + self.client_seconds + self.engine_seconds

    @property
    def is_kept(self) -> bool:
        """Whether it costs no more than the limit."""
        return self.seconds <= LIMIT_SECONDS

    def __str__(self) -> str:
        verdict = "within" if self.is_kept else "OVER"
        return (
            f"each of {NUM_SESSIONS} sessions at once, of {NUM_TURNS} turns and {self.num_tokens} tokens, costs"
            f" {self.seconds:.2f} s of CPU, {verdict} the limit of {LIMIT_SECONDS:g} s: {self.agent_seconds:.2f} s"
            f" for the agent, {self.client_seconds:.2f} s to reach the engine, {self.engine_seconds:.2f} s there"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the limit."""
        return {**asdict(self), "limit_seconds": LIMIT_SECONDS}


def measure_session(
    generation: Generation, engines: Sequence[Any], engine_cpu: Callable[[], float], model_path: Path
) -> SessionCost:
    """Run rollouts as an agent of tools does; `engine_cpu()` returns the CPU seconds of the engines' processes.

    The agent is measured on written answers, since random tokens call no tools. `model_path` has its tokenizer.
    """
    import ray

    ray.get([engine.set_mean.remote(NUM_TOKENS / NUM_TURNS / 2) for engine in engines], timeout=60)
    codec = ChatCodec(model_path)
    asyncio.run(_use_tools(codec, 5))  # makes what is made once
    began = time.process_time()
    asyncio.run(_use_tools(codec, NUM_TURNS))
    return asyncio.run(_measure(generation, engine_cpu, agent_seconds=time.process_time() - began))


async def _measure(generation: Generation, engine_cpu: Callable[[], float], *, agent_seconds: float) -> SessionCost:
    """Sample as a rollout worker does: by a client of its own, on one event loop."""
    from recipes.generation.clients.client import FollowingClient

    client = FollowingClient("bench", generation.num_engines, max_model_len=MODEL_TOKENS, deadline_seconds=60.0)
    generation.subscribe(client.follow)  # nothing changes later, so it is told on this loop
    await _converse_at_once(client, 5)  # makes what is made once
    began, began_engine = time.process_time(), engine_cpu()
    num_tokens = await _converse_at_once(client, NUM_TURNS)
    here, there = time.process_time() - began, engine_cpu() - began_engine
    return SessionCost(
        num_tokens=num_tokens // NUM_SESSIONS,
        agent_seconds=agent_seconds,
        client_seconds=here / NUM_SESSIONS,
        engine_seconds=there / NUM_SESSIONS,
    )


async def _converse_at_once(sampler: Sampler, num_turns: int) -> int:
    """Return the tokens of all rollouts together."""
    return sum(await asyncio.gather(*(_converse(sampler, num_turns, number) for number in range(NUM_SESSIONS))))


async def _converse(sampler: Sampler, num_turns: int, prompt: int) -> int:
    """Take turns; what a tool answers brings each turn to the same length."""
    per_turn = NUM_TOKENS // NUM_TURNS
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=per_turn)
    client = PolicyClient(sampler, sampling, MODEL_TOKENS, affinity=prompt, rollout=0)
    seen = TokenIds()
    for turn in range(num_turns):
        new = tuple(range(1000, 1000 + turn * per_turn - len(seen))) or (1,)
        prompt_ids = seen.plus(new)
        completion = await client.generate(prompt_ids, max_tokens=per_turn)
        seen = prompt_ids.plus(completion.token_ids)
    client.close()
    return len(seen)


@dataclass(frozen=True, slots=True)
class _Written:
    """A model that says the same in every turn."""

    token_ids: tuple[int, ...]
    max_model_len: int = MODEL_TOKENS

    async def generate(self, prompt_token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        count = len(self.token_ids)
        span = VersionSpan(version=0, start=0, end=count)
        return Completion(token_ids=self.token_ids, logprobs=(-0.5,) * count, versions=(span,), finish_reason="stop")


async def _use_tools(codec: ChatCodec, num_turns: int) -> None:
    """Let a written policy and a tool take turns; each says half of the tokens of a turn."""
    half = codec.text(codec.token_ids(_WORDS)[: NUM_TOKENS // NUM_TURNS // 2])
    call = "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    says = (*codec.token_ids(f"<think>{half}</think>\n{call}"), codec.eos_token_id)
    episode = Episode(
        row={},
        codec=codec,
        model=_Written(says),
        verifier=cast(Any, None),  # nothing is scored
        patterns=FlagPatterns(invalid_tool_call=("<tool_call>",), thinking_tags=("<think>", "</think>")),
        max_tokens=len(says),
    )
    tool = {"type": "function", "name": "run", "parameters": {"properties": {"command": {"type": "string"}}}}
    said = Conversation(episode, {"input": [{"role": "user", "content": "Look around."}], "tools": [tool]})
    for _ in range(num_turns):
        [called] = await said.next_turn()
        said.add_answer(half, call_id=called["call_id"])
