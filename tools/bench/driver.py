"""The part of the bench that runs on the Ray cluster at RAY_ADDRESS: measure, print, write and compare with limits."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from pathlib import Path

from recipes.config.load import load_config, require_runnable
from recipes.errors import RecipeError
from tools.bench.rollouts import ENVIRONMENT, measure_rollouts
from tools.bench.training import measure_pushes, measure_training
from tools.bench.verdict import (
    SETTINGS,
    Check,
    Results,
    load_warning,
    machine,
    push_costs,
    push_table,
    rollout_check,
    table,
    training_checks,
    write,
)


def main(argv: list[str] | None = None) -> int:
    """Run the bench and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--config", "--run-dir", "--out"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--steps", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    try:
        checks = _bench(args)
    except RecipeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if all(check.is_kept for check in checks) else 1


def _bench(args: argparse.Namespace) -> list[Check]:
    found = machine()
    config = require_runnable(load_config(args.config, [*args.overrides, *SETTINGS]))

    # Imported after the checks: these load torch and vLLM.
    from recipes.config.keys.derive import derive
    from recipes.grpo.refit import refit
    from recipes.grpo.setup import setup
    from recipes.stop import StopRequest

    stop = StopRequest.from_environment(None)
    stop.install()
    shutil.rmtree(args.run_dir / config.checkpointing.checkpoint_dir, ignore_errors=True)
    run = setup(config, derive(config), args.run_dir, stop)
    try:
        refit(run.policy, run.generation, version=run.state.step)
        # Before training: our engine then holds the weights that plain vLLM loads.
        ways = measure_rollouts(run, args.run_dir, num_rounds=args.rounds)
        runs = measure_training(run, args.run_dir, num_steps=args.steps)
        pushes = measure_pushes(run, args.run_dir, num_steps=args.steps)
    finally:
        run.close()
    checks = [*training_checks(runs), rollout_check(ways, ENVIRONMENT)]
    results = Results(machine=found, training=runs, pushes=pushes, rollouts=ways, checks=checks)
    print(f"{table(checks, ways)}\n\n{push_table(push_costs(pushes))}")
    write(args.out, results)
    if warning := load_warning(found):
        print(f"bench: {warning}")
    print(f"bench: {args.out}, {args.out.with_suffix('.html')}")
    return checks


if __name__ == "__main__":
    sys.exit(main())
