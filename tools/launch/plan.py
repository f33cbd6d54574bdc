"""Plan one launch: environment and command line in, NUL-separated words out: `print` or `exec`, then the argv.

    draft (variables, configuration) -> argv -> doctor -> run directory, snapshot, run.lock.json

With --dry-run nothing is written, and what the doctor finds is a note: the argv is what would be executed. With
--force the findings that may be forced are notes (tools/planning/findings.py says which). With --check only the
variables and the configuration are looked at: files need not be there yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.errors import LaunchError, RecipeError
from tools.command_line import exit_status
from tools.doctor.examine import examine
from tools.launch.prepare import Plan, prepare, unprepared
from tools.launch.submit import local_argv, sbatch_argv
from tools.nemo_rl.launch import driver_words
from tools.planning.draft import ROOT, Draft, draft_launch
from tools.planning.findings import Finding, errors, forced, found
from tools.planning.profiles import with_variables
from tools.planning.snapshot import read_code, snapshot_path

LATER = ("CFG002", "CFG003", "CFG004")  # errors in spite of which a dry run can print the command


def make_plan(stage: str, overrides: Sequence[str], environ: Mapping[str, str], root: Path = ROOT) -> Plan:
    """Plan a launch; raises `LaunchError` with everything that is wrong with its variables and configuration."""
    return plan_draft(draft_launch(stage, overrides, environ, root))


def plan_draft(draft: Draft) -> Plan:
    """Make the command of a draft; raises `LaunchError` with the problems that leave none."""
    in_the_way = [finding for finding in errors(draft.findings) if finding.code not in LATER]
    if in_the_way or draft.loaded is None or draft.sizes is None or draft.run_dir is None:
        raise LaunchError([finding.problem for finding in in_the_way])
    root, contract, run_dir = draft.root, draft.contract, draft.run_dir
    code = read_code(root)
    reuse_newest = not contract.is_set("REFRESH_CODE_SNAPSHOT")
    is_copied = not contract.is_local and not contract.is_set("SKIP_CODE_SNAPSHOT")
    home = root / contract["CODE_SNAPSHOT_DIRNAME"] / contract["EXP_NAME"]
    code_dir = snapshot_path(home, code, reuse_newest=reuse_newest) if is_copied else root
    # A configuration of this repository is read from the copy of the code that runs.
    config_path = draft.loaded.path
    seen_config = code_dir / config_path.relative_to(root) if config_path.is_relative_to(root) else config_path
    program = str(code_dir / "recipes" / "run_grpo.py")
    driver: tuple[str, ...] = (program, "--config", str(seen_config), "--run-dir", str(run_dir), *draft.overrides)
    if contract["ENGINE"] == "nemo_rl":
        driver = driver_words(contract, draft.environ, run_dir)
    if contract.is_local:
        argv = local_argv(run_dir, draft.sizes, driver)
    else:
        argv = sbatch_argv(draft, draft.sizes, run_dir, code_dir, driver)
    return Plan(
        root=root,
        contract=contract,
        stage=draft.stage.id if draft.stage else "",
        loaded=draft.loaded,
        sizes=draft.sizes,
        run_dir=run_dir,
        code_dir=code_dir,
        code=code,
        argv=with_variables(argv, draft.job_variables),
    )


def start_findings(draft: Draft) -> list[Finding]:
    """Return what keeps a planned launch from starting on this machine."""
    if draft.contract.is_local or shutil.which("sbatch") is not None:
        return []
    fix = "start it on a login node of the cluster, or set LAUNCHER=local to run on this machine"
    return [found("SLM008", where="LAUNCHER=slurm", wrong="there is no sbatch on this machine", fix=fix)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the words that super_launch.sh passes on."""
    parser = argparse.ArgumentParser(prog="tools.launch.plan", description="Plan one launch.")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--stage", default="")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args(argv)


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Draft, examine, plan, prepare; write the argv."""
    args = parse(argv)
    draft = draft_launch(args.stage, args.overrides, os.environ)
    if args.check:
        wrong = errors(draft.findings)
        say([str(finding) for finding in wrong])
        return LaunchError.exit_code if wrong else 0
    is_dry = args.dry_run or draft.contract.is_set("DRY_RUN")
    findings = [*examine(draft), *([] if is_dry else start_findings(draft))]
    findings = forced(findings) if args.force else findings
    say([f"note: {finding}" for finding in findings if finding.severity == "note"])
    refused = errors(findings)
    if not is_dry and refused:
        say([str(finding) for finding in refused])
        return LaunchError.exit_code
    try:
        plan = plan_draft(draft)
        done = unprepared(plan) if is_dry else prepare(plan)
    except RecipeError as error:
        say([str(finding) for finding in refused] or str(error).splitlines())
        return error.exit_code
    say([*(f"would be refused: {finding}" for finding in refused), *done])
    sys.stdout.write("\0".join(("print" if is_dry else "exec", *plan.argv)) + "\0")
    return 0


def say(lines: Sequence[str]) -> None:
    """Write messages beside the argv."""
    for line in lines:
        print(f"super_launch.sh: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
