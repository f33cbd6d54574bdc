"""Train one stage: check every input, connect to Ray, set up, train.

Exit status: 0 done; 1 the run failed; 2 an input is wrong (all problems are printed); 69 parts of it did not start on
some nodes, which are named; 75 the run stopped early and saved, start it again to resume.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipes.config.load import LoadedConfig, load_config, require_runnable, with_defaults
from recipes.errors import RecipeError, memory_cause, memory_kills, resource_problem
from recipes.files import write_atomically
from recipes.imports import without_gc
from recipes.stop import EXIT_RESUME, LEAVE_SECONDS, StopRequest, leave_within

logger = logging.getLogger("recipes.run_grpo")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="stage or overlay YAML file")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of this run, results/EXP_NAME")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides, the last wins")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run and return the exit status."""
    args = parse(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    kills = memory_kills()
    try:
        return run_stage(args.config, args.run_dir.resolve(), args.overrides)
    except RecipeError as error:
        for line in filter(None, (memory_cause(kills), *str(error).splitlines())):
            print(f"run_grpo: {line}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        traceback.print_exc()
        for words in filter(None, (memory_cause(kills), str(resource_problem(error, "the run")))):
            print(f"run_grpo: {words}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        if said := memory_cause(kills):
            print(f"run_grpo: {said}", file=sys.stderr)
        return 1


def run_stage(config_path: Path, run_dir: Path, overrides: list[str]) -> int:
    """Check the configuration, write it down resolved, then set up and train."""
    loaded = load_config(config_path, overrides)
    config = require_runnable(loaded)
    stop = StopRequest.from_environment(config.checkpointing.checkpoint_must_save_by)
    stop.install()
    write_resolved(loaded, run_dir)

    logger.info("the configuration is written to %s; loading the libraries", run_dir / "resolved.json")
    # Heavy imports come after the checks, so that a typo is reported in under a second, without torch.
    with without_gc():
        from recipes.config.keys.derive import derive
        from recipes.grpo.setup import setup
        from recipes.grpo.train import train
        from recipes.heartbeat import Heartbeat

    with Heartbeat(run_dir, config.deadlines) as heartbeat:
        run = setup(config, derive(config), run_dir, stop)
        heartbeat.watch(run)
        try:
            train(run)
        except BaseException as failure:
            run.save_after(failure)
            with suppress(Exception):  # the first failure is the one to report
                run.close()
            raise
        run.close()
    if not run.is_complete:
        logger.warning("stopped at step %d (%s); start again to resume", run.state.step, run.stop.reason)
        return EXIT_RESUME
    fewer = f" ({run.shortfall})" if run.shortfall else ""
    logger.info("done: step %d%s, checkpoints in %s", run.state.step, fewer, run.saver.root)
    return 0


def without_secrets(tree: Any) -> Any:
    """Return a configuration without the keys of servers that ask for one: files of a run are shared."""
    if isinstance(tree, Mapping):
        hidden = {name: "(hidden)" for name in tree if name == "api_key" and tree[name]}
        return {name: without_secrets(value) for name, value in tree.items()} | hidden
    return tree


def write_resolved(loaded: LoadedConfig, run_dir: Path) -> None:
    """Write resolved.json: every value that this start uses, those of verifiers too, and the file that set it."""
    whole = with_defaults(loaded)
    content = {"config": without_secrets(whole.tree), "sources": whole.sources, "files": whole.files}
    text = json.dumps(content, indent=2, default=dict) + "\n"
    write_atomically(run_dir / "resolved.json", text.encode())


if __name__ == "__main__":
    status = main()
    leave_within(LEAVE_SECONDS, status)
    sys.exit(status)
