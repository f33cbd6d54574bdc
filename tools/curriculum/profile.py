"""Profile a checkpoint: sample several answers to each row, score them, and record the row's pass rate.

    python -m tools.curriculum.profile --stage stage1.1 --model DIR --data F --run-dir DIR [--samples 8]

Starts a one-node Ray cluster with the engines of the configuration and no policy. The same command resumes after a
kill: rows that have a pass rate are not sampled again. `make curriculum` reads the result, RUN_DIR/pass_rates.jsonl.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from recipes.config.keys.derive import derive
from recipes.config.keys.judges import started_judges
from recipes.config.load import load_config, require_runnable
from recipes.config.stages import config_path, find_stage
from recipes.errors import CheckpointError, ConfigError, Problem
from recipes.grpo.data import PromptDataset
from recipes.grpo.metrics import PASS_REWARD
from tools.command_line import exit_status, positive
from tools.curriculum.profile_ledger import ProfileLedger, what_is_measured
from tools.files.row_files import require_file
from tools.job.local import LocalRun, supervise

SETTINGS = (  # a profile validates nothing
    "data.validation.data_path=null",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
)


@exit_status
def main(arguments: list[str] | None = None) -> int:
    """Run the profile. Return 0 when every row has a pass rate, 1 when a row has no verdict, 2 for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tools.curriculum.profile", description=__doc__.split("\n", 1)[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--stage", help="stage whose engines and environments are used, at SCALE on PLATFORM")
    which.add_argument("--config", type=Path, help="configuration file to use instead of a stage's")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in Hugging Face format")
    parser.add_argument("--data", type=Path, required=True, help="rows to profile")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the result and the logs")
    parser.add_argument("--samples", type=positive, default=8, help="answers per row")
    parser.add_argument("--pass-reward", type=float, default=PASS_REWARD, help="smallest reward that counts as solved")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides, the last wins")
    args = parser.parse_intermixed_args(arguments)
    run_dir = args.run_dir.resolve()
    require_file(args.data, fix="make the data, or correct --data")
    if not (args.model / "config.json").is_file():
        wrong = f"{args.model} is no checkpoint in Hugging Face format: it has no config.json"
        fix = "give MODEL_PATH=DIR; `make tiny` makes models/tiny-sft"
        raise CheckpointError(Problem(where="--model", wrong=wrong, fix=fix))
    overrides = [
        f"policy.model_name={args.model.resolve()}",
        f"data.train.data_path={args.data.resolve()}",
        *SETTINGS,
        *args.overrides,
    ]
    config = args.config or config_path(
        find_stage(args.stage), os.environ.get("SCALE") or "prod", os.environ.get("PLATFORM") or "h100"
    )
    checked = require_runnable(load_config(config, overrides))
    if judges := started_judges(checked):
        fix = "give its base_url, or leave it out with its rows"
        raise ConfigError([Problem(where=one.key, wrong="a profile starts no judge", fix=fix) for one in judges])
    measured = what_is_measured(checked, args.data, samples=args.samples, pass_reward=args.pass_reward)
    ledger = ProfileLedger.open(run_dir, measured)
    if ledger.is_finished(len(PromptDataset(args.data))):
        print(f"profile: {ledger.result} is up to date")
        return 0
    derived = derive(checked)
    options = {
        "--config": config,
        "--run-dir": run_dir,
        "--data": args.data.resolve(),
        "--samples": args.samples,
        "--pass-reward": args.pass_reward,
    }
    pairs = [str(word) for pair in options.items() for word in pair]
    command = (sys.executable, "-u", "-m", "tools.curriculum.profile_driver", *pairs, *overrides)
    num_units = derived.num_engines * derived.gpus_per_engine
    return supervise(LocalRun(run_dir=run_dir, command=command, num_units=num_units))


if __name__ == "__main__":
    sys.exit(main())
