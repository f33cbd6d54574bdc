"""`python -m tools.bench.swe`: how soon a task's container starts, and what an agent's rollout costs beside the model.

The task is a tiny repository. The model's answers are written down, and come after a wait, as those of engines
elsewhere do: what the processor works meanwhile is the agent, its container and the hidden tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.swe.containers.runtime import runtime_of_machine
from recipes.environments.swe.contract import ContainerLimits
from recipes.errors import RecipeError
from recipes.files import write_atomically
from recipes.types import Completion, Rollout, VersionSpan
from tools.bench.verdict import load_warning, machine
from tools.tiny.model import build_tokenizer
from tools.tiny.repositories import TinyRepository, metadata_of
from tools.tiny.task_images import make_images

REPOSITORY = TinyRepository(module="TomRome", kind="product", planted="-")
AGENT = "swe_agents_train"
LIMITS = ContainerLimits(memory_mib=256)
ANSWER_SECONDS = 0.5  # that the model takes for a turn
END = "<|im_end|>"


@dataclass
class Written:
    """A policy that says one given text per call, after a wait."""

    codec: ChatCodec
    says: Sequence[str]
    seconds: float
    num_asked: int = 0
    max_model_len: int = 100_000
    waited: float = field(default=0.0)

    async def generate(self, prompt_token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Return the next answer; the last is repeated."""
        await asyncio.sleep(self.seconds)
        ids = self.codec.token_ids(self.says[min(self.num_asked, len(self.says) - 1)])
        self.num_asked += 1
        span = VersionSpan(version=0, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), versions=(span,), finish_reason="stop")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return 0, or 1 when containers cannot be run or a rollout was not solved."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.swe", description=__doc__)
    parser.add_argument("--containers", type=int, default=200, help="containers that are started")
    parser.add_argument("--at-once", type=int, default=4, help="of these at the same time")
    parser.add_argument("--agents", type=int, default=16, help="rollouts at the same time")
    parser.add_argument("--out", type=Path, default=Path("results/bench_swe.json"), help="JSON result")
    args = parser.parse_args(argv)
    found = machine()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-swe-") as name:
            place = Path(name)
            place.chmod(0o755)  # the containers' user passes through
            result = measure(place, args)
    except RecipeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print("\n".join([load_warning(found), *(f"{key:<44} {value:.3g}" for key, value in result.items())]).strip())
    write_atomically(args.out, json.dumps({"machine": found, **result}, indent=1).encode())
    return 0 if result["solved share"] == 1.0 else 1


def measure(place: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures by their names."""
    make_images(place / "images", [REPOSITORY])
    starts, ends = asyncio.run(life_cycles(place / "images" / REPOSITORY.id, args.containers, args.at_once))
    asyncio.run(run_agents(place, 1, wait_seconds=0.0))  # imports, threads and images
    cpu, start = cpu_seconds(), time.monotonic()
    rollouts = asyncio.run(run_agents(place, args.agents, wait_seconds=ANSWER_SECONDS))
    seconds, spent = time.monotonic() - start, cpu_seconds() - cpu
    turns = sum(len(rollout.turns) for rollout in rollouts)
    return {
        "container start, p50 (s)": statistics.median(starts),
        "container start, p99 (s)": statistics.quantiles(starts, n=100)[98],
        "container end, p99 (s)": statistics.quantiles(ends, n=100)[98],
        "rollouts at once": float(args.agents),
        "CPU outside the model, of one rollout (s)": spent / len(rollouts),
        "CPU outside the model, of one turn (s)": spent / max(turns, 1),
        "CPU outside the model, share of the machine": spent / seconds / len(os.sched_getaffinity(0)),
        "solved share": sum(rollout.reward == 1.0 for rollout in rollouts) / len(rollouts),
    }


def cpu_seconds() -> float:
    """Return the processor time of this process and of those below it that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


async def life_cycles(image: Path, count: int, at_once: int) -> tuple[list[float], list[float]]:
    """Start and end containers; return the seconds of each start, with its first shell, and of each end."""
    runtime, places = runtime_of_machine(), asyncio.Semaphore(at_once)
    starts, ends = [], []

    async def cycle() -> None:
        async with places:
            start = time.monotonic()
            container = await runtime.start(str(image), LIMITS)
            try:
                await container.open_shell()
                starts.append(time.monotonic() - start)
            finally:
                start = time.monotonic()
                await container.close()
                ends.append(time.monotonic() - start)

    await asyncio.gather(*(cycle() for _ in range(count)))
    return starts, ends


async def run_agents(place: Path, count: int, *, wait_seconds: float) -> list[Rollout]:
    """Return the rollouts of agents that all solve the same task at the same time; images and tokenizer are made."""
    make_images(place / "images", [REPOSITORY])
    if not (place / "tokenizer").is_dir():
        build_tokenizer().save_pretrained(place / "tokenizer")
    codec = ChatCodec(place / "tokenizer")
    settings = {
        "container_formatter": f"{place}/images/{{instance_id}}",
        "agent_prompt_overrides": [{"harness": "tiny"}],
        "apptainer_memory_limit_mb": LIMITS.memory_mib,
    }
    instances = {AGENT: {"responses_api_agents": {"swe_agents": settings}}}
    config: Any = SimpleNamespace(
        judge_texts="own",
        nemo_gym=SimpleNamespace(instances=instances, invalid_tool_call_patterns=(), thinking_tags=()),
    )
    row = {"responses_create_params": {"input": [], "metadata": metadata_of(REPOSITORY)}, "agent_ref": {"name": AGENT}}
    module = f"{REPOSITORY.module}.py"
    says = [
        _called("view", path=module),
        _called("replace", path=module, old=f"a {REPOSITORY.planted} b", new=f"a {REPOSITORY.right} b"),
        f"so</think>Done{END}",
    ]
    environments = Environments.from_config(config, codec)
    try:
        runs = (environments.run(row, Written(codec, says, wait_seconds), max_tokens=512) for _ in range(count))
        return list(await asyncio.gather(*runs))
    finally:
        environments.close()


def _called(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"so</think>\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>{END}"


if __name__ == "__main__":
    sys.exit(main())
