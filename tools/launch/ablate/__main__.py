"""Compare variants of a stage over several seeds: `make ablate STAGE=stage1.1 SCALE=tiny LAUNCHER=local`.

    python -m tools.launch.ablate --stage stage1.1 [--seeds "42 43 44"] [--set KEY=VALUE] [KEY=VALUE,VALUE ...]

Each value of each KEY is one variant, compared with the stage as its file has it; without a KEY the variants are those
of configs/ablations.yaml. All are checked before the first one starts. On this machine they run one after the other,
and the page is written after each; on Slurm each is a job of its own, and --page writes the page of what has run. The
same command resumes: runs that have reached their end are left out.

Exit status: 0 all runs have ended well, or are submitted; 1 a run failed, the others went on; 2 an input is wrong and
nothing was started; 75 stopped early and saved.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import InputError, LaunchError, Problem
from recipes.files import write_atomically
from tools.command_line import exit_status
from tools.draft.launch import ROOT, scale_of
from tools.launch.ablate.page import render
from tools.launch.ablate.variants import (
    Variant,
    VariantRun,
    make_runs,
    refusals,
    require_distinct,
    should_go_on,
    start,
    variants_in,
    variants_of,
)
from tools.look.report.load import RunData, load_run

ABLATIONS = ROOT / "configs" / "ablations.yaml"
FAILED = 1


@exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Check, run and draw; return the exit status."""
    options = parse(arguments)
    variants = variants_of(options.variants) if options.variants else variants_in(options.file)
    seeds = seeds_of(options.seeds)
    name = os.environ.get("EXP_NAME") or f"ablate-{options.stage}-{scale_of(os.environ)}"
    runs = make_runs(options.stage, name, variants, seeds, options.set)
    page = runs[0].run_dir.with_name(f"{name}.html")
    if options.page:
        return write_page(page, name, runs, seeds)
    if refused := refusals(runs, is_only_input=options.check):
        print("\n".join(f"ablate: {line}" for line in refused), file=sys.stderr)
        return LaunchError.exit_code
    if options.check:
        say(f"{len(variants)} variants x {len(seeds)} seeds = {len(runs)} runs: their variables and keys are right")
        return 0
    return run_all(options.stage, name, runs, seeds, page)


def run_all(stage: str, name: str, runs: Sequence[VariantRun], seeds: Sequence[int], page: Path) -> int:
    """Run or submit what has not reached its end; returns the exit status."""
    is_local = runs[0].launch.contract.is_local
    failed: list[str] = []
    for number, run in enumerate(runs, start=1):
        what = f"{run.variant.name}, seed {run.seed} ({number} of {len(runs)})"
        if run.is_finished:
            say(f"{what}: has reached its end, left out")
            continue
        say(f"{what}: begins, {run.run_dir}")
        status = start(run, stage)
        if not should_go_on(status):
            say(f"{what}: stopped early; the same command goes on")
            return status
        if status:
            failed.append(f"{what}: ended with status {status}")
            say(failed[-1])
        if is_local:
            write_page(page, name, runs, seeds)
    if not is_local:
        say("when the jobs have ended, write the page: the same command with ARGS=--page")
    say(f"{len(runs) - len(failed)} of {len(runs)} runs are well")
    return FAILED if failed else 0


def write_page(page: Path, name: str, runs: Sequence[VariantRun], seeds: Sequence[int]) -> int:
    """Write the page of what has run, and print its path; raises `InputError` when nothing has."""
    data: dict[Variant, dict[int, RunData]] = {}
    notes = []
    for run in runs:
        by_seed = data.setdefault(run.variant, {})
        try:
            by_seed[run.seed] = load_run(run.run_dir)
        except InputError:
            notes.append(f"{run.variant.name}, seed {run.seed}: no step yet")
            continue
        if not run.is_finished:
            notes.append(f"{run.variant.name}, seed {run.seed}: has not reached its end")
    if not any(data.values()):
        fix = "start the runs first: the same command without --page"
        raise InputError(Problem(where=name, wrong="none of its runs has done a step", fix=fix))
    content = render(name, data, num_seeds=len(seeds), notes=notes)
    write_atomically(page, content.encode(errors="replace"))
    print(page, flush=True)
    return 0


def seeds_of(text: str) -> list[int]:
    """Return the seeds of a text such as "42 43"; raises `LaunchError`."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        expected, fix = "whole numbers, such as 42 43 44", "correct it"
        raise LaunchError(Problem(where="SEEDS", got=repr(text), expected=expected, fix=fix))
    seeds = [int(word) for word in words]
    require_distinct(seeds)
    return seeds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch.ablate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", required=True, help="stage of configs/stages.yaml, at SCALE on PLATFORM")
    parser.add_argument("--seeds", default="42 43 44", help="seeds of each variant")
    parser.add_argument("--file", type=Path, default=ABLATIONS, help="variants where no KEY is given")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override of all variants")
    parser.add_argument("--check", action="store_true", help="check seeds, variants and configuration, and stop")
    parser.add_argument("--page", action="store_true", help="write the page of what has run, and start nothing")
    parser.add_argument("variants", nargs="*", metavar="KEY=VALUE,VALUE", help="one variant per value")
    return parser.parse_intermixed_args(arguments)


def say(line: str) -> None:
    """Write a message beside the output of the runs."""
    print(f"ablate: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
