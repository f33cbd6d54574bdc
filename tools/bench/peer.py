"""`make bench-peer`: the tiny stage beside TRL's GRPOTrainer, on the same model, rows, rewards and batch.

    python -m tools.bench.peer [--steps 8] [--rounds 3] [KEY=VALUE ...]

TRL runs in a process of its own, whose packages are installed to build/peer. The two sides run in turn, and the median
of the rounds' ratios counts, so that a slow minute of the machine changes both. While TRL runs, the processes of our
side wait and use no core. Exit status: 0 when TRL's step takes at least the limit times ours, 1 when not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from recipes.config.load import load_config, require_runnable
from recipes.errors import RecipeError, RunError
from recipes.files import write_atomically
from tools.bench.__main__ import INPUTS, NUM_UNITS, ROOT
from tools.bench.verdict import SETTINGS, Check, load_warning, machine, median_ratio, table
from tools.job.local import LocalRun, supervise
from tools.packages import install_packages

LIMITS: Mapping[tuple[float, int], float] = {(0.0, 1): 1.5, (0.5, 1): 2.0, (0.5, 2): 3.0}
"""Mean environment latency in seconds, max_trajectory_age_steps -> the smallest ratio of TRL's step time to ours.

A batch of age A may be generated from the end of the training step A + 1 before its own. So A + 1 steps take at least
one generation, one wait for the slowest rollout and one training step, which TRL's step takes one after the other: the
ratio of the waits is at most A + 1.
"""
PLACE = ROOT / "build" / "peer"
PACKAGES, REQUIREMENTS = PLACE / "packages", Path(__file__).with_name("peer_requirements.txt")
WARMUP_STEPS = 2
TRL_SECONDS = 1800.0  # for one run of TRL


def trl_seconds(args: argparse.Namespace, latency: float) -> float:
    """Return the median seconds of a step of TRL, the first steps left out."""
    out = args.run_dir / "trl.json"
    out.unlink(missing_ok=True)
    words = ["--config", args.config, "--out", out, "--steps", WARMUP_STEPS + args.steps, "--latency", latency]
    command = [sys.executable, "-m", "tools.bench.trl_side", *map(str, words), *args.overrides]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGES}",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),  # TRL's best: it computes one thing at a time
        "ACCELERATE_USE_CPU": "true",
        "TORCHDYNAMO_DISABLE": "1",
    }
    log = args.run_dir / "trl.log"
    with log.open("wb") as file:
        try:
            done = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=TRL_SECONDS, check=False)
        except subprocess.TimeoutExpired as late:
            raise RunError(f"TRL did not end within {TRL_SECONDS:g} s; see {log}") from late
    if done.returncode:
        raise RunError(
            f"TRL ended with status {done.returncode}; see {log}:\n{log.read_text(encoding='utf-8')[-1500:]}"
        )
    ends: list[float] = json.loads(out.read_text(encoding="utf-8"))
    return statistics.median(later - earlier for earlier, later in pairwise(ends[WARMUP_STEPS - 1 :]))


def measure(args: argparse.Namespace) -> list[Check]:
    """Measure both sides in turn, with the head at RAY_ADDRESS."""
    config = require_runnable(load_config(args.config, [*args.overrides, *SETTINGS]))

    # Imported after the check: these load torch and vLLM.
    from recipes.config.keys.derive import derive
    from recipes.grpo.refit import refit
    from recipes.grpo.setup import setup
    from recipes.stop import StopRequest
    from tools.bench.training import START, measure_once

    stop = StopRequest.from_environment(None)
    stop.install()
    run = setup(config, derive(config), args.run_dir, stop)
    ours: dict[tuple[float, int], list[float]] = {case: [] for case in LIMITS}
    theirs: dict[float, list[float]] = {latency: [] for latency, _ in LIMITS}
    try:
        refit(run.policy, run.generation, version=run.state.step)
        start = args.run_dir / START
        shutil.rmtree(start, ignore_errors=True)
        run.policy.save(start)
        for number in range(1, args.rounds + 1):
            for latency in theirs:
                for case in (case for case in LIMITS if case[0] == latency):
                    run.policy.load(start)
                    num = WARMUP_STEPS + args.steps
                    times = measure_once(run, args.run_dir, max_age=case[1], latency=latency, num_steps=num)
                    ours[case].append(times.seconds_per_step)
                theirs[latency].append(trl_seconds(args, latency))
                figures = ", ".join(f"age {age} {ours[at, age][-1]:.3f} s" for at, age in LIMITS if at == latency)
                trl = theirs[latency][-1]
                print(f"bench-peer: round {number}, {latency:g} s environment: {figures}, TRL {trl:.3f} s", flush=True)
    finally:
        run.close()
    return [
        Check(
            name=f"TRL's step over ours at age {age}, {latency:g} s environment",
            ratio=median_ratio(theirs[latency], ours[latency, age]),
            limit=limit,
            detail=f"{statistics.median(theirs[latency]):.3f} s, {statistics.median(ours[latency, age]):.3f} s a step",
        )
        for (latency, age), limit in LIMITS.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Start a one-node Ray cluster and run this program on it, which then measures."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.peer", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny/stage1_rlvr.yaml"), help="stage to measure")
    parser.add_argument("--run-dir", type=Path, default=PLACE / "run", help="logs of the bench")
    parser.add_argument("--out", type=Path, default=Path("results/bench_peer.json"), help="JSON result")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both sides at each latency")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # on the cluster
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides, the last wins")
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    args.run_dir = args.run_dir.resolve()
    try:
        if not args.inside:
            install_packages(REQUIREMENTS, PACKAGES)
            command = (sys.executable, "-u", "-m", "tools.bench.peer", "--inside", *words)
            return supervise(LocalRun(run_dir=args.run_dir, command=command, num_units=NUM_UNITS))
        args.overrides = [*INPUTS, *args.overrides]
        found = machine()
        checks = measure(args)
    except RecipeError as error:
        print(f"bench-peer: {error}", file=sys.stderr)
        return error.exit_code
    print(table(checks, ()))
    result = {"machine": found, "checks": [{**asdict(check), "is_kept": check.is_kept} for check in checks]}
    write_atomically(args.out, json.dumps(result, indent=1).encode())
    if warning := load_warning(found):
        print(f"bench-peer: {warning}")
    return 0 if all(check.is_kept for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
