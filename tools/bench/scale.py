"""`python -m tools.bench.scale`: what a step of production size costs the driver, on this machine and without a model.

The step has the size of stage 1: 256 prompts with 16 rollouts each, whose lengths are log-normal with a mean of 9,300
tokens and end at 65,024. Collector, rollout workers with their agents and scoring processes, routing, object store,
buffer, rewards, advantages, planning and the ranks' fetching and packing are those of a run, on a real Ray. Three parts
are not: engines answer with random tokens, a thousand times as fast as real ones; the tokenizer and the questions are
those of the tiny stages; a rank stops at its first packed microbatch. Steps with fewer or shorter rollouts show how the
cost grows. Then rollouts of 200 turns and 100,000 tokens, as in stage 2.2, go through sessions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.config.load import load_config, require_valid
from recipes.errors import RecipeError
from recipes.files import write_atomically
from tools.bench.scale_session import SessionCost, measure_session
from tools.bench.scale_step import (
    HEADS,
    MEAN_TOKENS,
    MODEL_TOKENS,
    MOST_TOKENS,
    Parts,
    Rank,
    StepCost,
    StepSize,
    cpu_seconds,
    measure,
    write_inputs,
)
from tools.bench.verdict import load_warning, machine

if TYPE_CHECKING:
    from recipes.config.tree import Config

STORE_BYTES = 2 << 30
PARTS = (16, 4, 1)  # of the largest step: steps of 256, 1,024 and 4,096 rollouts show how the cost grows
NUM_IDS = 256  # the pieces of the tiny tokenizer that stand for one byte
TINY = Path(__file__).resolve().parents[2] / "configs/tiny/stage1_rlvr.yaml"


@contextmanager
def running(config: Config, args: argparse.Namespace) -> Iterator[Parts]:
    """Run a Ray instance of our own with all parts of a step; `config` is that of the stage to plan for."""
    import ray

    from recipes.cluster.private import private_ray
    from recipes.rollouts.workers import RolloutWorkers
    from tools.bench.random_engines import start_engines

    with (
        tempfile.TemporaryDirectory(prefix="bench-scale-", ignore_cleanup_errors=True) as directory,
        private_ray(args.ranks, object_store_memory=STORE_BYTES),
    ):
        place = Path(directory)
        write_inputs(place, args.prompts)
        own = _workers_config(place, args)
        multiple = config.policy.make_sequence_length_divisible_by
        ranks = [ray.remote(Rank).options(num_cpus=1).remote(multiple) for _ in range(args.ranks)]
        generation, engines = start_engines(own, args.engines, mean_tokens=MEAN_TOKENS, num_ids=NUM_IDS)
        workers = RolloutWorkers(own, [{"num_cpus": 0} for _ in range(args.workers)])
        workers.connect(generation)
        ray.get([rank.__ray_ready__.remote() for rank in ranks], timeout=300)
        yield Parts(
            config=config,
            rows=place / "rows.jsonl",
            workers=workers,
            generation=generation,
            engines=engines,
            ranks=ranks,
        )
        workers.close()
        generation.shutdown()


def _workers_config(place: Path, args: argparse.Namespace) -> Config:
    """Return the configuration of the rollout workers and the engines: the tiny stage with long answers."""
    loaded = load_config(
        TINY,
        [
            f"policy.model_name={place / 'model'}",
            f"policy.max_total_sequence_length={MODEL_TOKENS}",
            f"policy.generation.max_new_tokens={MOST_TOKENS}",
            f"cluster.gpus_per_node={args.engines + 1}",
            f"policy.generation.colocated.resources.gpus_per_node={args.engines}",
            "deadlines.generation=550",
            "deadlines.rollout=560",
            "deadlines.progress=570",
        ],
    )
    return require_valid(loaded)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write; return 0, 1 when a session costs more than its limit, or 2 for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/stage1_rlvr.yaml"), help="stage to plan for")
    parser.add_argument("--out", type=Path, default=Path("results/bench_scale.json"), help="JSON result")
    parser.add_argument("--prompts", type=int, default=256, help="prompts of the largest step")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument("--engines", type=int, default=4, help="engines that answer with random tokens")
    args = parser.parse_args(argv)
    if args.prompts < PARTS[0] or min(args.ranks, args.workers, args.engines) < 1:
        parser.error(f"at least {PARTS[0]} prompts, 1 rank, 1 worker and 1 engine are needed")
    found = machine()
    try:
        config = require_valid(load_config(args.config))
        with running(config, args) as parts:
            costs, session = _measure_all(parts, num_prompts=args.prompts)
    except RecipeError as error:
        print(f"bench-scale: {error}", file=sys.stderr)
        return error.exit_code
    widths = [max(len(row[column]) for row in (HEADS, *(cost.row() for cost in costs))) for column in range(len(HEADS))]
    for row in (HEADS, *(cost.row() for cost in costs)):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"bench-scale: {session}")
    result = {"machine": found, "steps": [asdict(cost) for cost in costs], "session": session.as_dict()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, json.dumps(result, default=str).encode())
    if warning := load_warning(found):
        print(f"bench-scale: {warning}")
    print(f"bench-scale: {args.out}")
    return 0 if session.is_kept else 1


def _measure_all(parts: Parts, *, num_prompts: int) -> tuple[list[StepCost], SessionCost]:
    sizes = [StepSize(num_prompts=num_prompts // part, mean_tokens=MEAN_TOKENS) for part in PARTS]
    sizes += [StepSize(num_prompts=num_prompts, mean_tokens=MEAN_TOKENS // 4)]
    measure(StepSize(num_prompts=4, mean_tokens=100), parts)  # makes what is made once
    costs = [measure(size, parts) for size in sizes]
    engine_cpu = partial(cpu_seconds, "ray::RandomEngine")
    return costs, measure_session(parts.generation, parts.engines, engine_cpu, parts.rows.parent / "model")


if __name__ == "__main__":
    sys.exit(main())
