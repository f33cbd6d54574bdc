"""As many agents as a step of stage 2 has, over real HTTP, against an engine that echoes: conformance case 41."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.model_server.agent import UrlAgents
from recipes.environments.model_server.session import RolloutSession, SessionLimits
from recipes.types import Completion, VersionSpan
from tools.tiny.tokenizer import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_AGENTS, NUM_TURNS = 768, 20
MAX_LEFT = 64 << 20  # bytes that stay in use afterwards: what the allocator keeps, not 768 rollouts
END = "<|im_end|>"
ENGINE_SECONDS = 0.05  # of one answer


class Echo:
    """An engine that says again which agent asked it, and at which turn."""

    max_model_len = 100_000

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        await asyncio.sleep(ENGINE_SECONDS)
        asked = re.findall(r"agent \d+ turn \d+", self.codec.text(prompt_token_ids))
        ids = (*self.codec.token_ids(f"so</think>{asked[-1]}"), self.codec.eos_token_id)
        span = VersionSpan(version=1, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), versions=(span,), finish_reason="stop")


def memory() -> int:
    """Return the bytes that this process has in memory, once what is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


async def run_agents(agents: UrlAgents, codec: ChatCodec, *, first: int, count: int) -> None:
    """Let agents talk to their own rollout each, all at once; each checks every answer."""
    server = await agents.server_for("127.0.0.1")
    limits, patterns = SessionLimits(max_tokens=64), FlagPatterns(invalid_tool_call=(), thinking_tags=())

    async def agent(number: int, http: httpx.AsyncClient) -> None:
        session = RolloutSession(codec=codec, model=Echo(codec), patterns=patterns, limits=limits)
        async with server.serving(session) as base_url:
            client = openai.AsyncOpenAI(base_url=base_url, api_key="any", http_client=http, timeout=600)
            history: list[dict[str, Any]] = []
            for turn in range(NUM_TURNS):
                question = f"agent {number} turn {turn}"
                history.append({"role": "user", "content": question})
                reply = await client.chat.completions.create(model="policy", messages=history)  # type: ignore[arg-type]
                history.append(reply.choices[0].message.model_dump(exclude_none=True))
                assert history[-1]["content"] == question
            assert len(session.forest.nodes) == NUM_TURNS and len(session.forest.roots) == 1
            assert not session.forest.counts and not session.counts["suffix_mismatches"]

    limits_of_client = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    async with httpx.AsyncClient(timeout=600, limits=limits_of_client) as http:
        await asyncio.gather(*(agent(first + number, http) for number in range(count)))


async def test_case_41_768_agents_of_20_turns(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    codec, agents = ChatCodec(tmp_path), UrlAgents()
    await run_agents(agents, codec, first=10_000, count=32)  # imports, threads and caches
    before, start = memory(), time.monotonic()
    await run_agents(agents, codec, first=20_000, count=NUM_AGENTS)
    seconds, most = time.monotonic() - start, memory()
    print(f"{NUM_AGENTS * NUM_TURNS / seconds:.0f} calls a second; memory {before >> 20} -> {most >> 20} MiB")
    assert most - before < MAX_LEFT
    agents.close()
