"""As many agents as a step of stage 2 has, over real HTTP, against an engine that echoes: conformance case 41."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import re
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.environments.agents.by_url.agent import UrlAgents
from recipes.environments.agents.by_url.forest import CallNode
from recipes.environments.agents.by_url.session import Call, RolloutSession, SessionLimits
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.types import Completion, VersionSpan
from tools.tiny.model import build_tokenizer

pytestmark = [pytest.mark.functional, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_AGENTS, NUM_TURNS = 768, 20
MAX_HEAP, MAX_SMALL = 4 << 20, 60_000  # bytes and objects beyond those at the start; a rollout alone has 870 objects
CACHED_TEXTS = 10_000  # that the tokenizer keeps, whatever it has read: with these its cache is full from the start
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


class _Heap(ctypes.Structure):
    """What the C library says of its heap: `struct mallinfo2`."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@dataclass(frozen=True)
class Memory:
    """What is allocated and not freed.

    The resident memory of the process tells less: an allocator keeps a page of which one object is left.
    """

    heap: int  # bytes, of the C library: large objects, and what the tokenizer keeps
    small: int  # objects of Python's own allocator, at most 512 bytes each
    rollouts: int  # objects of the product that only a rollout has

    @classmethod
    def now(cls) -> Memory:
        """Return what is in use once all garbage is collected."""
        gc.collect()
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Heap
        heap = library.mallinfo2()
        rollouts = sum(isinstance(kept, RolloutSession | CallNode | Call) for kept in gc.get_objects())
        return cls(heap=heap.uordblks + heap.hblkhd, small=sys.getallocatedblocks(), rollouts=rollouts)


async def run_agents(agents: UrlAgents, codec: ChatCodec, *, first: int, count: int) -> None:
    """Let agents talk to their own rollout each, all at once; each checks every answer."""
    server = await agents.server_for("127.0.0.1")
    limits, patterns = SessionLimits(max_tokens=64), FlagPatterns(invalid_tool_call=(), thinking_tags=())
    unused = ssl.create_default_context()  # a client makes one of its own otherwise

    async def agent(number: int) -> None:
        session = RolloutSession(codec=codec, model=Echo(codec), patterns=patterns, limits=limits)
        # Each has a client of its own, as programs have. A pool that all share looks at every connection for every
        # request, and closes one that it has promised to a task which is late to use it.
        async with server.serving(session) as base_url, httpx.AsyncClient(timeout=600, verify=unused) as http:
            history: list[dict[str, Any]] = []
            for turn in range(NUM_TURNS):
                question = f"agent {number} turn {turn}"
                history.append({"role": "user", "content": question})
                reply = await http.post(f"{base_url}/chat/completions", json={"model": "policy", "messages": history})
                assert reply.status_code == 200, reply.text
                history.append(reply.json()["choices"][0]["message"])
                assert history[-1]["content"] == question
            assert len(session.forest.nodes) == NUM_TURNS and len(session.forest.roots) == 1
            assert (
                not session.forest.counts and not session.counts["suffix_mismatches"] and not session.counts["retries"]
            )

    await asyncio.gather(*(agent(first + number) for number in range(count)))


async def test_case_41_768_agents_of_20_turns(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    codec, agents = ChatCodec(tmp_path), UrlAgents()
    for number in range(CACHED_TEXTS):
        codec.token_ids(f"a text to keep, number {number}")
    await run_agents(agents, codec, first=10_000, count=32)  # imports, threads and caches
    before, start = Memory.now(), time.monotonic()
    await run_agents(agents, codec, first=20_000, count=NUM_AGENTS)
    seconds, after = time.monotonic() - start, Memory.now()
    print(f"{NUM_AGENTS * NUM_TURNS / seconds:.0f} calls a second; {before}, then {after}")
    assert after.rollouts == 0
    assert after.heap - before.heap < MAX_HEAP and after.small - before.small < MAX_SMALL
    agents.close()
