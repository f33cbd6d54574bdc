"""The part of a profile that runs on the Ray cluster at RAY_ADDRESS: engines and environments, but no policy."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.config.load import load_config, require_runnable
from recipes.errors import RecipeError, StalledError
from recipes.grpo.metrics import profile_entry
from tools.data.curriculum.profile import GREEDY, ProfileLedger, greedy, what_is_measured
from tools.progress import duration

if TYPE_CHECKING:
    from recipes.config.tree import Config
    from recipes.grpo.data import PromptDataset
    from recipes.grpo.rollout import RolloutCollector
    from recipes.rollouts.group import StoredGroup
    from recipes.types import Sampling

ROWS_IN_FLIGHT = 64  # per engine; enough to keep its batch full while the last answers of a row are scored
REPORT_SECONDS = 10.0


def main(argv: list[str] | None = None) -> int:
    """Run the profile and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--config", "--run-dir", "--data"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--pass-reward", type=float, required=True)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    try:
        return _profile(args)
    except RecipeError as error:
        print(f"profile: {error}", file=sys.stderr)
        return error.exit_code


def _profile(args: argparse.Namespace) -> int:
    config = require_runnable(load_config(args.config, args.overrides))

    # Imported after the checks: these load torch and vLLM.
    from recipes.environments.chat.codec import ChatCodec
    from recipes.environments.environments import Environments
    from recipes.grpo.data import require_rows, row_id
    from recipes.types import Sampling

    environments = Environments.from_config(config.env, ChatCodec.from_config(config.policy))
    dataset = require_rows(args.data, environments.check_row)
    cfg = config.policy.generation
    sampled = Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_tokens=cfg.max_new_tokens)
    passes = [_Pass(args.run_dir, sampled, args.samples)]
    if args.greedy:
        passes.append(_Pass(args.run_dir / GREEDY, replace(sampled, temperature=0.0), 1))
    measured = what_is_measured(config, args.data, samples=args.samples, pass_reward=args.pass_reward)
    known = [greedy(measured) if one.sampling.temperature == 0 else measured for one in passes]
    ledgers = [ProfileLedger.open(one.directory, entries) for one, entries in zip(passes, known, strict=True)]
    missing = [[row for row in range(len(dataset)) if row + 1 not in ledger.entries] for ledger in ledgers]
    with _collector(config, dataset) if any(missing) else nullcontext((None, 0)) as (collector, num_engines):
        for one, ledger, rows in zip(passes, ledgers, missing, strict=True):
            how = f"{one.num_samples} answers each" if one.sampling.temperature else "one greedy answer each"
            print(f"profile: {len(dataset)} rows, {how}: {len(ledger.entries)} known already, {len(rows)} to answer")

            def start(index: int, one: _Pass = one) -> Future[StoredGroup]:
                assert collector is not None
                rollouts = collector.run_group(dataset[index], one.sampling, affinity=index, num=one.num_samples)
                return collector.submit(rollouts)

            limit = config.deadlines.progress
            for index, (headers, _) in _in_flight(rows, start, ROWS_IN_FLIGHT * num_engines, deadline_seconds=limit):
                row = dataset[index]
                agent = row["agent_ref"]["name"]
                ledger.add(profile_entry(index + 1, row_id(row), agent, headers, pass_reward=args.pass_reward))
    without_verdict = 0
    for ledger, entries in zip(ledgers, known, strict=True):
        counts = ledger.finish(entries)
        print(f"profile: {ledger.result}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
        without_verdict += counts["without_verdict"]
    return 1 if without_verdict else 0


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over the rows, with a ledger of its own."""

    directory: Path
    sampling: Sampling
    num_samples: int


@contextmanager
def _collector(config: Config, dataset: PromptDataset) -> Iterator[tuple[RolloutCollector, int]]:
    """Start engines and rollout workers without a policy; give a collector on them, and the number of engines."""
    import ray

    from recipes.cluster.connect import connect
    from recipes.cluster.placement import spread
    from recipes.cluster.token_store import RayTokenStore
    from recipes.config.keys.derive import derive
    from recipes.generation.generation import Generation
    from recipes.grpo.buffer import ReplayBuffer
    from recipes.grpo.data import PromptStream, RolloutSettings
    from recipes.grpo.rollout import RolloutCollector
    from recipes.rollouts.workers import RolloutWorkers
    from recipes.types import Sampling

    connect()
    workers = RolloutWorkers(config, spread(config.grpo.async_grpo.num_rollout_workers))
    derived, cfg = derive(config), config.policy.generation
    units = derived.gpus_per_engine
    is_gpu = bool(ray.cluster_resources().get("GPU", 0) > 0)
    options = {"num_cpus": 0, "num_gpus": units if is_gpu else 0, "resources": {"worker_units": units}}
    generation = Generation.start(
        cfg,
        model_path=config.policy.model_name,
        seed=config.grpo.seed,
        placement=[options] * derived.num_engines,
        deadlines=config.deadlines,
        loads_weights=True,
    )
    settings = RolloutSettings(
        num_prompts_per_step=1,
        num_generations_per_prompt=1,
        max_trajectory_age_steps=0,
        max_generation_failures=config.grpo.async_grpo.max_generation_failures,
        sampling=Sampling(temperature=cfg.temperature, top_p=cfg.top_p, max_tokens=cfg.max_new_tokens),
        max_model_len=cfg.vllm_cfg.max_model_len,
        circuit_breaker=config.env.circuit_breaker,
    )
    stream = PromptStream(dataset, num_epochs=1, shuffle=False, seed=0)
    buffer = ReplayBuffer(num_prompts_per_step=1, max_trajectory_age_steps=0)
    workers.connect(generation)
    collector = RolloutCollector(stream, workers, buffer, RayTokenStore(), settings)
    try:
        yield collector, derived.num_engines
    finally:
        collector.close()
        workers.close()
        generation.shutdown()


def _in_flight(
    indices: Sequence[int], start: Callable[[int], Future[StoredGroup]], limit: int, *, deadline_seconds: float
) -> Iterator[tuple[int, StoredGroup]]:
    """Yield (row index, group) as rows finish, with `limit` rows in flight.

    Raises `StalledError` when no row finishes within `deadline_seconds`.
    """
    waiting = list(reversed(indices))
    running: dict[Future[StoredGroup], int] = {}
    begin = last = time.monotonic()
    done = 0
    while waiting or running:
        while waiting and len(running) < limit:
            index = waiting.pop()
            running[start(index)] = index
        finished, _ = wait(running, timeout=deadline_seconds, return_when=FIRST_COMPLETED)
        if not finished:
            raise StalledError(f"profile: no row finished within {deadline_seconds:g} s (deadlines.progress)")
        for future in finished:
            done += 1
            yield running.pop(future), future.result()
        now = time.monotonic()
        if now - last >= REPORT_SECONDS:
            last = now
            left = duration((len(indices) - done) * (now - begin) / done)
            print(f"profile: {done} of {len(indices)} rows, {done / (now - begin):.1f} rows/s, {left} left", flush=True)


if __name__ == "__main__":
    sys.exit(main())
