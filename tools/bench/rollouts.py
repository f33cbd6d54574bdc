"""Our rollout path compared with plain vLLM: the same prompts and samples in flight, with rounds in turn.

The ways between the two show where the time goes. All engines stay up and generate one at a time. A round of each way
follows a round of the others, so that a slow minute of the machine changes all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.errors import RunError, StalledError
from recipes.types import Completion, Sampling
from tools.bench.verdict import GenerationSpeed

if TYPE_CHECKING:
    from recipes.config.tree import Config
    from recipes.grpo.run import Run

PLAIN, LOGPROBS, ASYNC, OURS, ENVIRONMENT = (
    "vLLM LLM.generate",
    "+ log-probabilities",
    "+ AsyncLLM",
    "Generation.generate",
    "rollouts with environments",
)
ADDS: Mapping[str, str] = {
    PLAIN: "plain vLLM: a list of prompts in, token ids out",
    LOGPROBS: "the log-probability of each sampled token",
    ASYNC: "an engine that takes requests at any time; our scheduler and engine arguments",
    OURS: "the Ray actor, weight versions, a seed per sample",
    ENVIRONMENT: "a rollout worker: chat template, decoding, the verifiers' scores",
}
STEPS_PER_ROUND = 4  # a round submits the rollouts of so many training steps at once
START_SECONDS, ROUND_SECONDS = 180.0, 120.0
DROPPED_ARGUMENTS = (
    "scheduler_cls",
    "worker_extension_cls",
    "weight_transfer_config",
    "logprobs_mode",
    "distributed_executor_backend",
)
OUR_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # our engine sets it; plain vLLM keeps its default

Round = Callable[[], tuple[int, float]]
"""Generates everything once; returns sampled tokens and seconds."""


def measure_rollouts(run: Run, run_dir: Path, *, num_rounds: int) -> list[GenerationSpeed]:
    """Return the tokens per second of each way, from plain vLLM to our whole rollout path."""
    from recipes.environments.chat.codec import ChatCodec

    rows = _rows(run)
    codec = ChatCodec.from_config(run.config.policy)
    prompts = [list(codec.encode(row["responses_create_params"])) for row in rows]
    sampling = run.collector.settings.sampling
    group_size = run.collector.settings.num_generations_per_prompt
    engine = _engine_arguments(run.config)
    job = {"prompts": prompts, "sampling": {"n": group_size, **_sampling_arguments(run.config, sampling)}}
    with (
        PlainVllm({**job, "kind": "llm", "engine": _plain(engine)}, run_dir / "vllm.log", _environment()) as plain,
        PlainVllm(
            {**job, "kind": "async", "engine": engine}, run_dir / "vllm_async.log", _environment() | OUR_ENVIRONMENT
        ) as online,
    ):
        rounds: dict[str, Round] = {
            PLAIN: lambda: plain.round(logprobs=None),
            LOGPROBS: lambda: plain.round(logprobs=0),
            ASYNC: lambda: online.round(logprobs=0),
            OURS: lambda: _on_loop(run, lambda: _generate_all(run, prompts, sampling, group_size)),
            ENVIRONMENT: lambda: _on_loop(run, lambda: _roll_out_all(run, rows, sampling, group_size)),
        }
        for generate in rounds.values():
            generate()  # warm-up: compile, and fill the prefix caches
        speeds: dict[str, list[float]] = {name: [] for name in rounds}
        for _ in range(num_rounds):
            for name, generate in rounds.items():
                tokens, seconds = generate()
                speeds[name].append(tokens / seconds)
    return [GenerationSpeed(name=name, adds=ADDS[name], tokens_per_second=tuple(speeds[name])) for name in rounds]


class PlainVllm:
    """A `tools.bench.plain_vllm` process."""

    def __init__(self, job: Mapping[str, Any], log: Path, env: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.plain_vllm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **env},
            )
        self._job = job

    def __enter__(self) -> PlainVllm:
        self._ask(self._job, deadline=START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def round(self, *, logprobs: int | None) -> tuple[int, float]:
        """Generate once; returns sampled tokens and seconds, both measured inside the process."""
        answer = self._ask({"logprobs": logprobs}, deadline=ROUND_SECONDS)
        return answer["tokens"], answer["seconds"]

    def _ask(self, question: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(question).encode() + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], deadline)[0]:
            raise StalledError(f"plain vLLM gave no answer within {deadline:g} s (log: {self._log})")
        line = stdout.readline()
        if not line:
            raise RunError(f"plain vLLM exited with status {self._process.wait(timeout=10)} (log: {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _on_loop(run: Run, work: Callable[[], Awaitable[int]]) -> tuple[int, float]:
    async def timed() -> tuple[int, float]:
        start = time.perf_counter()
        return await work(), time.perf_counter() - start

    return run.collector.submit(timed()).result(timeout=ROUND_SECONDS)


async def _generate_all(run: Run, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> int:
    calls = [
        run.generation.generate(tuple(prompt), sampling, affinity=index, sample=(number,))
        for index, prompt in enumerate(prompts)
        for number in range(group_size)
    ]
    completions: list[Completion] = await asyncio.gather(*calls)
    return sum(len(completion.token_ids) for completion in completions)


async def _roll_out_all(run: Run, rows: Sequence[Any], sampling: Sampling, group_size: int) -> int:
    groups = await asyncio.gather(
        *(run.collector.run_group(row, sampling, affinity=index, num=group_size) for index, row in enumerate(rows))
    )
    return sum(header.num_generated_tokens for headers, _ in groups for header in headers)


def _rows(run: Run) -> list[Any]:
    """Return the rows of a round: enough to keep the engine's batch full most of the time."""
    from recipes.grpo.data import PromptDataset

    rows = PromptDataset(Path(run.config.data.train.data_path))
    count = STEPS_PER_ROUND * run.collector.settings.num_prompts_per_step
    return [rows[index % len(rows)] for index in range(count)]


def _engine_arguments(config: Config) -> dict[str, Any]:
    from recipes.generation.engine_args import engine_args

    cfg = config.policy.generation
    cfg = replace(cfg, vllm_cfg=replace(cfg.vllm_cfg, expose_http_server=False))
    return engine_args(cfg, model_path=config.policy.model_name, seed=config.grpo.seed, is_cpu=True)


def _plain(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in engine.items() if name not in DROPPED_ARGUMENTS}


def _sampling_arguments(config: Config, sampling: Sampling) -> dict[str, Any]:
    from recipes.generation.engine_args import stop_token_ids

    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(stop_token_ids(Path(config.policy.model_name))),
        "detokenize": False,
    }


def _environment() -> dict[str, str]:
    """Return the settings that vLLM on a CPU needs for its full speed; they change nothing else."""
    from recipes.generation.engine_args import CPU_ENV, ENV

    return {name: value for name, value in {**ENV, **CPU_ENV}.items() if name not in OUR_ENVIRONMENT}
