"""Plain vLLM in a process of its own: reads one job, then generates all its prompts once per line of input.

    {"kind": "llm" | "async", "engine": {...}, "sampling": {...}, "prompts": [[...], ...]}    the job
    {"logprobs": 0 | null}                                         one round -> {"tokens": N, "seconds": S}

`llm` is `LLM.generate`, as in vLLM's own throughput benchmarks. `async` is `AsyncLLM` with one task per prompt, as a
program needs that does other work while it generates. Standard output carries only answers; vLLM's own output goes to
standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


def main() -> int:
    """Serve rounds until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # from here on everything is printed to standard error
    job = json.loads(sys.stdin.readline())
    asyncio.run(_serve(job, answers))
    return 0


async def _serve(job: dict[str, Any], answers: Any) -> None:
    engine = _Async(job) if job["kind"] == "async" else _Offline(job)
    print(json.dumps({"ready": True}), file=answers)
    # No request is in flight between two rounds, so a blocking read delays nothing.
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = await engine.generate(json.loads(line)["logprobs"])
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}), file=answers)
    engine.close()


class _Offline:
    """`LLM.generate` on the whole list."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM, TokensPrompt

        self._llm = LLM(**job["engine"])
        self._sampling = job["sampling"]
        self._prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]

    async def generate(self, logprobs: int | None) -> int:
        from vllm import SamplingParams

        params = SamplingParams(logprobs=logprobs, flat_logprobs=True, **self._sampling)
        outputs = self._llm.generate(self._prompts, params, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    def close(self) -> None:
        """The engine lives in this process and ends with it."""


class _Async:
    """`AsyncLLM.generate`, one task per prompt."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))
        self._sampling = job["sampling"]
        self._prompts = job["prompts"]
        self._num_requests = 0

    async def generate(self, logprobs: int | None) -> int:
        return sum(await asyncio.gather(*(self._one(prompt, logprobs) for prompt in self._prompts)))

    async def _one(self, prompt: list[int], logprobs: int | None) -> int:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            logprobs=logprobs, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **self._sampling
        )
        self._num_requests += 1
        tokens = 0
        async for output in self._llm.generate(TokensPrompt(prompt_token_ids=prompt), params, f"{self._num_requests}"):
            tokens = sum(len(one.token_ids) for one in output.outputs)
        return tokens

    def close(self) -> None:
        self._llm.shutdown()


if __name__ == "__main__":
    sys.exit(main())
