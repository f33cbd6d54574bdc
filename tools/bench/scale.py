"""`python -m tools.bench.scale`: what one step costs the driver, from the last rollout to the first packed microbatch.

The step has the size of stage 1: 256 prompts with 16 rollouts each, whose lengths are log-normal with a mean of 9,300
tokens and end at 65,024. Ray, its object store, the buffer, rewards, the batch, advantages, the plan and the fetching
of rows are those of a run. There is no engine and no model: the tokens are random, and a rank stops at its first packed
microbatch. Further steps with fewer prompts, or shorter rollouts, show how the cost grows. Only the ranks are fewer.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.config.load import load_config, require_valid
from recipes.errors import RecipeError
from recipes.files import write_atomically
from tools.bench.verdict import load_warning, machine

if TYPE_CHECKING:
    import numpy as np

    from recipes.config.tree import Config
    from recipes.policy.shards import BatchShard
    from recipes.tokens import TokenStore
    from recipes.types import Group, Rollout, TrainBatch

ROLLOUTS_PER_PROMPT = 16
MEAN_TOKENS, MOST_TOKENS, SIGMA = 9_300, 65_024, 1.0  # sigma is the spread of the logarithm of a length
PROMPT_TOKENS = 300
STORE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """One step that is measured."""

    num_prompts: int
    mean_tokens: int  # of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step cost."""

    size: StepSize
    num_tokens: int
    store_cpu_seconds: float  # to make arrays of all groups' tokens and put them into the object store
    stored_bytes: int
    driver_cpu_seconds: float  # from the full buffer to the calls of the ranks
    driver_bytes: int  # headers that came and shards that went
    first_microbatch_seconds: float  # from the last rollout to the first packed microbatch of the last rank

    def row(self) -> tuple[str, ...]:
        """Return the cells of the printed table."""
        return (
            str(self.size.num_prompts * ROLLOUTS_PER_PROMPT),
            f"{self.num_tokens / 1e6:.1f} M",
            f"{self.driver_cpu_seconds:.2f} s",
            f"{self.driver_bytes / 1e6:.2f} MB",
            f"{self.first_microbatch_seconds:.2f} s",
            f"{self.store_cpu_seconds:.2f} s",
            f"{self.stored_bytes / 1e6:.0f} MB",
        )


HEADS = ("rollouts", "tokens", "driver CPU", "driver bytes", "to first microbatch", "CPU to store", "stored")


class Rank:
    """A rank of the policy without a model: it fetches its rows and packs its first microbatch."""

    def __init__(self, multiple: int) -> None:
        from recipes.policy import step  # loaded before anything is measured, as in a rank that has a model

        self._multiple = multiple
        self._loss_inputs = step.loss_inputs

    def first_microbatch(self, shard: BatchShard) -> float:
        """Return the time, on the machine's own clock, at which the first microbatch and its loss inputs were ready."""
        import torch

        from recipes.cluster.token_store import RayTokenStore
        from recipes.policy.microbatch import pack_microbatch

        fetched, rows = shard.fetched(RayTokenStore()), shard.microbatches[0]
        packed = pack_microbatch(
            [fetched.row(row).token_ids for row in rows],
            rows,
            multiple=self._multiple,
            row_multiple=1,
            where=torch.device("cpu"),
        )
        self._loss_inputs(fetched, packed, torch.zeros(packed.tokens_1T.shape))
        return time.monotonic()


def random_rollouts(rng: np.random.Generator, size: StepSize) -> list[Rollout]:
    """Return one group of finished rollouts of one turn each, as agents hand them over."""
    import numpy as np

    from recipes.types import Rollout, RolloutStatus, Turn, VersionSpan

    mu = np.log(size.mean_tokens) - SIGMA**2 / 2
    rollouts = []
    for length in np.clip(rng.lognormal(mu, SIGMA, ROLLOUTS_PER_PROMPT), 1, MOST_TOKENS).astype(int).tolist():
        turn = Turn(
            prompt_token_ids=tuple(rng.integers(0, 131_072, PROMPT_TOKENS).tolist()),
            token_ids=tuple(rng.integers(0, 131_072, length).tolist()),
            logprobs=tuple((-rng.random(length)).tolist()),
            versions=(VersionSpan(version=0, start=0, end=length),),
            finish_reason="stop",
        )
        rollouts.append(
            Rollout(
                turns=(turn,),
                status=RolloutStatus.COMPLETED,
                reason="answered 12, key 12",
                reward=float(rng.integers(0, 2)),
                output_text="word " * length,
                metrics={"library_reward": 1.0},
            )
        )
    return rollouts


def measure(size: StepSize, config: Config, ranks: Sequence[Any], store: TokenStore) -> StepCost:
    """Take one step up to the first microbatch of every rank."""
    import numpy as np
    import ray

    from recipes.grpo.buffer import ReplayBuffer

    rng = np.random.default_rng(size.num_prompts * size.mean_tokens)
    buffer = ReplayBuffer(num_prompts_per_step=size.num_prompts, max_trajectory_age_steps=0)
    stored, store_seconds = 0, 0.0
    for number in range(size.num_prompts):
        rollouts = random_rollouts(rng, size)
        last_rollout, began = time.monotonic(), time.process_time()
        group, num_bytes = _store(number, rollouts, store)
        buffer.add(group)
        store_seconds += time.process_time() - began
        stored += num_bytes
    began = time.process_time()
    groups = buffer.take(0, deadline_seconds=60.0, waiting_for=lambda: "nothing")
    shards = _shards(groups, config, num_ranks=len(ranks))
    calls = [rank.first_microbatch.remote(shard) for rank, shard in zip(ranks, shards, strict=True)]
    driver_seconds = time.process_time() - began
    ready = max(ray.get(calls, timeout=120))
    return StepCost(
        size=size,
        num_tokens=sum(rollout.num_tokens for group in groups for rollout in group.rollouts),
        store_cpu_seconds=store_seconds,
        stored_bytes=stored,
        driver_cpu_seconds=driver_seconds,
        driver_bytes=sum(len(pickle.dumps(one.rollouts)) for one in groups) + sum(_pickled(one) for one in shards),
        first_microbatch_seconds=ready - last_rollout,
    )


def _store(number: int, rollouts: Sequence[Rollout], store: TokenStore) -> tuple[Group, int]:
    """Do with a finished group what a rollout worker does; return its header and the bytes of its arrays."""
    from dataclasses import fields

    from recipes.tokens import pack_rollouts
    from recipes.types import Group, PromptRef

    headers, tokens = pack_rollouts(rollouts)
    group = Group(
        prompt=PromptRef(epoch=0, row_index=number, prompt_id="ab" * 8),
        agent="math_with_judge_simple_agent",
        prompt_text="What is 7 + 5?",
        target_step=0,
        version=0,
        rollouts=headers,
        tokens=store.put(tokens),
    )
    return group, sum(getattr(tokens, field.name).nbytes for field in fields(tokens))


def _shards(groups: Sequence[Group], config: Config, *, num_ranks: int) -> list[BatchShard]:
    """Do with a step's groups what the train loop and the policy's handle do before the ranks are called."""
    from recipes.grpo.advantage import add_advantages
    from recipes.grpo.batch import build_batch
    from recipes.grpo.reward import collect_rewards
    from recipes.policy.shards import plan, split

    rewards_B, _ = collect_rewards(groups, config)
    batch: TrainBatch = build_batch(groups, rewards_B, overlong_filtering=False, mask_flagged=True)
    batch, _ = add_advantages(batch, groups, config)
    return split(batch, plan(batch, config.policy, num_shards=num_ranks, training=True))


def _pickled(shard: BatchShard) -> int:
    import ray.cloudpickle

    return len(ray.cloudpickle.dumps(shard))


@contextmanager
def own_ray(num_ranks: int, multiple: int) -> Iterator[list[Any]]:
    """Run a Ray instance of our own, and give the handles of the ranks."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-scale-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        ray.init(
            address="local",
            num_cpus=num_ranks,
            include_dashboard=False,
            _temp_dir=directory,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
        )
        try:
            ranks = [ray.remote(Rank).options(num_cpus=1).remote(multiple) for _ in range(num_ranks)]
            ray.get([rank.__ray_ready__.remote() for rank in ranks], timeout=300)
            yield ranks
        finally:
            ray.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write; return 0, or 2 for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/stage1_rlvr.yaml"), help="stage to plan for")
    parser.add_argument("--out", type=Path, default=Path("results/bench_scale.json"), help="JSON result")
    parser.add_argument("--prompts", type=int, default=256, help="prompts of the largest step")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks")
    args = parser.parse_args(argv)
    if args.prompts < 4 or args.ranks < 1:
        parser.error(f"--prompts {args.prompts} --ranks {args.ranks}: at least 4 prompts and 1 rank are needed")
    found = machine()
    try:
        config = require_valid(load_config(args.config))
        costs = _measure_all(config, num_prompts=args.prompts, num_ranks=args.ranks)
    except RecipeError as error:
        print(f"bench-scale: {error}", file=sys.stderr)
        return error.exit_code
    widths = [max(len(row[column]) for row in (HEADS, *(cost.row() for cost in costs))) for column in range(len(HEADS))]
    for row in (HEADS, *(cost.row() for cost in costs)):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        args.out, json.dumps({"machine": found, "steps": [asdict(c) for c in costs]}, default=str).encode()
    )
    if warning := load_warning(found):
        print(f"bench-scale: {warning}")
    print(f"bench-scale: {args.out}")
    return 0


def _measure_all(config: Config, *, num_prompts: int, num_ranks: int) -> list[StepCost]:
    from recipes.cluster.token_store import RayTokenStore

    sizes = [StepSize(num_prompts=num_prompts // part, mean_tokens=MEAN_TOKENS) for part in (4, 2, 1)]
    sizes += [StepSize(num_prompts=num_prompts, mean_tokens=MEAN_TOKENS // part) for part in (4, 2)]
    with own_ray(num_ranks, config.policy.make_sequence_length_divisible_by) as ranks:
        store = RayTokenStore()
        measure(StepSize(num_prompts=4, mean_tokens=100), config, ranks, store)  # makes what is made once
        return [measure(size, config, ranks, store) for size in sizes]


if __name__ == "__main__":
    sys.exit(main())
