"""Run several stages in order, each from its parent's last complete export: `make pipeline STAGES="stage1.1 stage1.2"`.

    stages -> links (what each runs, from what, what is finished) -> doctor on all of them -> submit, or run one by one

On Slurm every job is submitted at once, held by `afterok` until its parent has ended well, and cancelled when the
parent fails. Its start weights do not exist yet: `tools/job/begin.py` finds and checks them when the job starts.
Started again, stages that have reached their end are left out and the others resume. On this machine the run ends with
one page about the whole chain; `--report` writes it at any time, on Slurm, too.

Exit status: 0 submitted, run or already finished; 2 an input is wrong and nothing was started, also of a dry run, which
prints its lines nevertheless; 1 a submission failed;
with LAUNCHER=local that of the stage that ended the sequence (75: stopped early and saved, start again to resume).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from recipes.errors import LaunchError, Problem, RecipeError
from tools.command_line import TRUE, exit_status
from tools.data.files.fetch import fetch_model
from tools.doctor.examine import examine
from tools.draft.findings import Finding, forced, found
from tools.draft.launch import ROOT, chosen_stages, parents_of, scale_of
from tools.hub import hub_name
from tools.launch.command import command_of, prepare, start_findings, unprepared
from tools.launch.sequence import Link, Step, make_links, paste, run_one_by_one, submit
from tools.look.report.chain import ChainStage, summary_lines, write_chain


def variable_problems(environ: Mapping[str, str], num_stages: int) -> list[Problem]:
    """Return a problem for each variable that one stage may have but not a sequence of them."""
    problems = []
    if environ.get("CONFIG_PATH") and num_stages > 1:
        wrong = f"it is set, and {num_stages} stages cannot share one configuration"
        fix = "unset it: the stage table has a file for each stage; ARGS sets keys in all of them"
        problems.append(Problem(where="CONFIG_PATH", wrong=wrong, fix=fix))
    if environ.get("ENGINE") not in (None, "", "native"):
        expected = "native, whose exports the next stage can find"
        fix = "start the stages one by one, each with the MODEL_PATH of its parent's converted checkpoint"
        problems.append(Problem(where="ENGINE", got=environ["ENGINE"], expected=expected, fix=fix))
    return problems


def inspect(links: Sequence[Link], *, is_dry: bool, force: bool, is_made_first: bool) -> list[str]:
    """Return everything that refuses the pipeline; notes are printed."""
    left = [link for link in links if not link.is_finished]
    findings = [[*examine(link.checked, is_dry=is_dry), *order_findings(link)] for link in left]
    if is_made_first:
        findings = [[finding for finding in some if not is_made(finding)] for some in findings]
    return refusals(left, [forced(some) for some in findings] if force else findings)


def refusals(links: Sequence[Link], findings: Iterable[Iterable[Finding]]) -> list[str]:
    """Return the errors of each stage as lines, equal findings of several stages once; print the notes."""
    where: dict[tuple[str, str, str], list[str]] = {}
    first: list[Finding] = []
    for link, some in zip(links, findings, strict=True):
        for finding in some:
            ids = where.setdefault(subject(finding), [])
            first += [] if ids else [finding]
            ids.append(link.stage.id)
    lines = [(finding, ", ".join(where[subject(finding)])) for finding in first]
    say(f"{ids}: note: {finding}" for finding, ids in lines if finding.severity == "note")
    return [f"{ids}: {finding}" for finding, ids in lines if finding.severity == "error"]


def subject(finding: Finding) -> tuple[str, str, str]:
    """Return what findings of several stages have in common: what is wrong where. Each may have its own advice."""
    return finding.code, finding.problem.where, finding.problem.what


def is_made(finding: Finding) -> bool:
    """Whether a finding is about rows, images or weights that the first command of a tiny chain makes."""
    places = (str(ROOT / "data"), str(ROOT / "models"))
    return finding.kind.is_made and any(place in str(finding.problem) for place in places)


def order_findings(link: Link) -> list[Finding]:
    """Refuse a stage that has trained already although its parent has not reached its end: it would mix two exports."""
    if not (link.is_pending and link.has_trained and link.parent is not None):
        return []
    parent = link.parent.stage.id
    return [
        found(
            "MDL008",
            where=f"EXP_NAME={link.run_dir.name}",
            wrong=f"{link.run_dir} has checkpoints, trained from an export of {parent} that was not its last",
            fix=f"move that directory away, or leave {parent} out of STAGES, or set another EXP_NAME",
        )
    ]


def make_steps(links: Sequence[Link]) -> list[Step]:
    """Return the stages that are still to run; raises `LaunchError` with the problems of all that have no command."""
    steps, problems = [], []
    for link in links:
        if link.is_finished:
            continue
        try:
            command = command_of(link.launch)
        except LaunchError as error:
            problems += error.problems
            continue
        after = link.parent.stage.id if link.is_pending and link.parent is not None else ""
        steps.append(
            Step(stage=link.stage.id, command=command, run_dir=link.run_dir, after=after, variables=link.variables)
        )
    if problems:
        raise LaunchError(list(dict.fromkeys(problems)))
    return steps


def left_out(links: Sequence[Link]) -> Iterator[str]:
    """Yield a note for each stage that does not start from its parent: it needs another model, or STAGES lacks that."""
    names = {link.stage.id for link in links}
    for link in links:
        if link.parent is None and names.intersection(parents_of(link.stage)):
            yield f"{link.stage.id}: it starts from {link.launch.contract['MODEL_PATH']}, which has what it trains"
        if link.parent is not None and link.parent.stage.id != link.stage.after:
            yield f"{link.stage.id}: it starts from {link.parent.stage.id}; {link.stage.after} is not in STAGES"


def run_pipeline(links: Sequence[Link], overrides: Sequence[str], *, is_dry: bool, force: bool, first: str) -> int:
    """Check all stages, then print, submit or run them; a dry run prints the command `first` before them."""
    refused = inspect(links, is_dry=is_dry, force=force, is_made_first=bool(first))
    if not is_dry:
        refused += [str(finding) for finding in start_findings(links[0].launch)]
    if refused and not is_dry:
        say(refused)
        return LaunchError.exit_code
    try:
        steps = make_steps(links)
    except LaunchError as error:
        say(refused or str(error).splitlines())
        return error.exit_code
    words = [*(["--force"] if force else []), *overrides]
    say(left_out(links))
    say(f"would be refused: {line}" for line in refused)
    say(f"{link.stage.id}: {link.run_dir.name} has reached its end, left out" for link in links if link.is_finished)
    if waiting := [step.stage for step in steps if step.after]:
        which = "start weights are the parent's last complete export, found and checked at the start"
        say([f"{', '.join(waiting)}: {which}"])
    if is_dry:
        say(line for step in steps for line in unprepared(step.command))
        print("\n".join([*([first] if first else []), *paste(steps, words, is_for_eyes=sys.stdout.isatty())]))
        return LaunchError.exit_code if refused else 0
    if not steps:
        say(["every stage has reached its end: nothing to do"])
        return 0
    if steps[0].command.launch.contract.is_local:
        return run_one_by_one(steps, words)
    for step in steps:
        say(f"{step.stage}: {line}" for line in prepare(step.command, is_model_there=not step.after))
    return submit(steps)


def report(links: Sequence[Link]) -> None:
    """Write the page about the chain, and say what each stage gained and where the page is."""
    stages = [
        ChainStage(
            stage=link.stage.id,
            name=link.stage.blend,
            run_dir=link.run_dir,
            is_finished=link.is_finished,
            parent=link.parent.stage.id if link.parent else "",
        )
        for link in links
    ]
    last = links[-1].run_dir
    prefix = os.environ.get("EXP_NAME") or "pipeline"
    page = write_chain(stages, last.parent / f"{prefix}-{scale_of(os.environ)}.html")
    say(summary_lines(stages))
    say([f"the whole chain on one page: {page}"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="tools.launch.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages",
        default="",
        help="ids or names, e.g. 'stage1.1 stage1.2'; empty: the first and all that descend from it",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop (also DRY_RUN=true)")
    parser.add_argument("--first", default="", metavar="COMMAND", help="what makes rows and weights before a dry run")
    parser.add_argument("--check", action="store_true", help="check variables and configuration, and stop")
    parser.add_argument("--force", action="store_true", help="make notes of the errors that may be forced")
    parser.add_argument("--report", action="store_true", help="only write the page about the chain")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides of every stage")
    return parser.parse_intermixed_args(argv)


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Link, inspect, and start; return the exit status."""
    args = parse(argv)
    is_dry = args.dry_run or os.environ.get("DRY_RUN", "").lower() in TRUE
    try:
        stages = chosen_stages(args.stages.split())
        if problems := variable_problems(os.environ, len(stages)):
            raise LaunchError(problems)
        links = make_links(stages, args.overrides, os.environ)
        if args.check:
            refused = refusals(links, [link.checked.findings for link in links])
            say(refused)
            return LaunchError.exit_code if refused else 0
        if (name := hub_name(os.environ.get("MODEL_PATH", ""))) and not is_dry and not args.report:
            fetch_model(name)
            links = make_links(stages, args.overrides, os.environ)
        how = {"is_dry": is_dry, "force": args.force, "first": args.first if is_dry else ""}
        status = 0 if args.report else run_pipeline(links, args.overrides, **how)
        has_run = links[0].launch.contract.is_local and not is_dry and status != LaunchError.exit_code
        if args.report or has_run:
            report(make_links(stages, args.overrides, os.environ))  # what is finished now
        return status
    except RecipeError as error:
        say(str(error).splitlines())
        return error.exit_code


def say(lines: Iterable[str]) -> None:
    """Write messages beside the commands."""
    for line in lines:
        print(f"pipeline: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
