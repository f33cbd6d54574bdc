"""`python -m tools.bench`: start a one-node Ray cluster, run the bench on it, and return its exit status."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipes.errors import RecipeError
from tools.draft.launch import TINY_DATA, TINY_DENSE_MODEL
from tools.job.local import LocalRun, supervise

ROOT = Path(__file__).resolve().parents[2]
INPUTS = (  # made by `make tiny`; overrides on the command line come later and win
    f"policy.model_name={ROOT / TINY_DENSE_MODEL}",
    f"data.train.data_path={ROOT / TINY_DATA}/train-split.jsonl",
    f"data.validation.data_path={ROOT / TINY_DATA}/val-split.jsonl",
)
NUM_UNITS = 2  # one policy worker, one engine: the tiny stage


def main(argv: list[str] | None = None) -> int:
    """Run the bench. Return 0 when every limit is kept, 1 when one is not or the bench failed, 2 for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny/stage1_rlvr.yaml"), help="stage to measure")
    parser.add_argument("--run-dir", type=Path, default=Path("build/bench"), help="logs and metrics of the bench")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/bench.json"),
        help="JSON result; a page is written beside it",
    )
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each training run")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each way to generate")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides, the last wins")
    args = parser.parse_args(argv)
    options = ("--config", "--run-dir", "--out", "--steps", "--rounds")
    values = (args.config, args.run_dir.resolve(), args.out.resolve(), args.steps, args.rounds)
    pairs = [str(word) for pair in zip(options, values, strict=True) for word in pair]
    command = (sys.executable, "-u", "-m", "tools.bench.driver", *pairs, *INPUTS, *args.overrides)
    try:
        return supervise(LocalRun(run_dir=args.run_dir.resolve(), command=command, num_units=NUM_UNITS))
    except RecipeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
