"""The command of one launch, as NUL-separated words for super_launch.sh: `print` or `exec`, then the argv.

    launch (variables, configuration, sizes, findings) -> doctor -> argv -> run directory, snapshot, run.lock.json

With --dry-run nothing is written: the argv is what would be executed, also where the doctor would refuse it, which
the exit status says. It leaves out the subjects of the doctor that take long (examine.THOROUGH). With --force the
findings that may be forced are notes (tools/draft/findings.py says which).
With --check only the variables and the configuration are looked at: files need not be there yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from recipes.config.load import with_defaults
from recipes.errors import LaunchError, RecipeError
from tools.command_line import exit_status
from tools.data.files.fetch import fetch_model
from tools.doctor.examine import examine
from tools.draft.contract import REQUIRED_WITH_CONTAINERS, Contract
from tools.draft.findings import Finding, errors, forced, found
from tools.draft.launch import Launch, read_launch
from tools.draft.mounts import container_arguments
from tools.draft.nemo_rl.export import driver_words, write_config
from tools.draft.profiles import with_variables
from tools.draft.provenance import LaunchRecord, write_run_lock
from tools.draft.slurm import asked_gres, signal_option
from tools.draft.snapshot import CodeVersion, add_side_files, read_code, read_snapshot, write_snapshot
from tools.hub import hub_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What starts one launch, and the code that it runs."""

    launch: Launch
    code: CodeVersion
    code_dir: Path  # where the job runs: the snapshot, or the checkout
    argv: tuple[str, ...]


def command_of(launch: Launch) -> Command:
    """Return the command of a launch; raises `LaunchError` with the problems that leave none."""
    launch.require_whole()
    code = read_code(launch.root)
    code_dir = launch.code_dir(code)
    return Command(launch=launch, code=code, code_dir=code_dir, argv=argv_of(launch, code_dir))


def prepare(command: Command, *, is_model_there: bool = True) -> list[str]:
    """Prepare the launch; return what the user should know, one line each.

    Without `is_model_there` the start weights are an export that the parent stage has still to write.
    """
    launch, code, code_dir = command.launch, command.code, command.code_dir
    contract, (loaded, sizes, run_dir) = launch.contract, launch.require_whole()
    if code_dir != launch.root:
        write_snapshot(launch.root, code_dir, code)
        add_side_files(launch.root, code_dir)
        code = read_snapshot(code_dir)  # an older one, with REFRESH_CODE_SNAPSHOT=false
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if cache := contract["PERSISTENT_CACHE"]:
        Path(cache).mkdir(parents=True, exist_ok=True)  # no container runtime mounts what is not there
    if contract["ENGINE"] == "nemo_rl":
        write_config(loaded, contract, run_dir)
    record = LaunchRecord(
        code=code,
        code_dir=code_dir,
        stage=launch.stage.id if launch.stage else "",
        config_path=loaded.path,
        config=with_defaults(loaded).tree,
        data_paths=[Path(contract["TRAIN_PATH"]), Path(contract["VAL_PATH"])],
        model_path=Path(contract["MODEL_PATH"]),
        is_model_there=is_model_there,
        images=images(contract),
    )
    changed = write_run_lock(run_dir, record)
    return [
        f"run directory {run_dir}",
        f"{sizes.num_train_nodes} train + {sizes.num_generation_nodes} generation + {sizes.num_judge_nodes} judge nodes"
        if not contract.is_local
        else f"{sizes.train_gpus} policy workers + {sizes.generation_gpus} engine workers"
        + (f" + {sizes.judge_units} judge workers" if sizes.judge_units else "")
        + " on this machine",
        *([] if is_model_there else [f"start weights {record.model_path}, found and checked when the job starts"]),
        *(f"differs from the last start: {change}" for change in changed),
    ]


def unprepared(command: Command) -> list[str]:
    """Return what a printed command needs and a dry run does not write."""
    path = command.code_dir
    if path.is_dir():
        return []
    return [f"the launch itself writes {path}; set SKIP_CODE_SNAPSHOT=true for a command that needs no copy"]


def images(contract: Contract) -> dict[str, str]:
    """Return the images of a launch, by variable; without containers there are none."""
    if contract.is_local or contract["CONTAINER_RUNTIME"] == "none":
        return {}
    return {name: contract[name] for name in REQUIRED_WITH_CONTAINERS}


JOB_FILE = Path("tools/job/ray.sbatch")
SANDBOX_COMMAND = "/start-with-nginx.sh"  # of the published sandbox image


def argv_of(launch: Launch, code_dir: Path) -> tuple[str, ...]:
    """Return the words of the command: the supervisor on this machine, or the submission to Slurm."""
    argv = local_argv(launch, code_dir) if launch.contract.is_local else sbatch_argv(launch, code_dir)
    return with_variables(argv, launch.job_variables)


def driver_argv(launch: Launch, code_dir: Path) -> tuple[str, ...]:
    """Return the words of the driver after `python`."""
    loaded, _, run_dir = launch.require_whole()
    if launch.contract["ENGINE"] == "nemo_rl":
        return driver_words(launch.contract, launch.environ, run_dir)
    # A configuration of this repository is read from the copy of the code that runs.
    path = loaded.path
    path = code_dir / path.relative_to(launch.root) if path.is_relative_to(launch.root) else path
    program = str(code_dir / "recipes" / "run_grpo.py")
    return (program, "--config", str(path), "--run-dir", str(run_dir), *launch.overrides)


def local_argv(launch: Launch, code_dir: Path) -> tuple[str, ...]:
    """Return the supervisor of a one-node cluster on this machine, and the driver."""
    _, sizes, run_dir = launch.require_whole()
    return (
        *(sys.executable, "-m", "tools.job.local"),
        f"--run-dir={run_dir}",
        f"--num-units={sizes.train_gpus + sizes.generation_gpus + sizes.judge_units}",
        *("--", sys.executable, *driver_argv(launch, code_dir)),
    )


def sbatch_argv(launch: Launch, code_dir: Path) -> tuple[str, ...]:
    """Return the submission: resources computed from the configuration, then the job file and its arguments."""
    contract, (_, sizes, run_dir) = launch.contract, launch.require_whole()
    checkpoints = run_dir / (launch.config.checkpointing.checkpoint_dir if launch.config else "checkpoints")
    gpus_per_node, num_nodes = sizes.total_gpus // sizes.num_nodes, contract.num_nodes(sizes.num_nodes)
    submit = (
        "sbatch",
        f"--job-name={contract['EXP_NAME']}",
        f"--account={contract['SLURM_ACCOUNT']}",
        f"--partition={contract['SLURM_PARTITION']}",
        f"--nodes={num_nodes}",
        *gres_words(asked_gres(contract["SBATCH_GRES"]), gpus_per_node, is_given="SBATCH_GRES" in launch.environ),
        "--exclusive",
        "--mem=0",  # all of it: --exclusive takes every CPU, but only the memory that is asked for
        f"--time={contract['SLURM_TIME_LIMIT']}",
        *signal_option(contract["SLURM_TIME_LIMIT"]),
        "--requeue",
        "--open-mode=append",
        f"--output={run_dir}/logs/slurm-%j.log",
        f"--chdir={code_dir}",
    )
    has_containers = contract["CONTAINER_RUNTIME"] != "none"
    python = "python" if has_containers else sys.executable  # the image's, or this one
    sandbox = contract["SANDBOX_COMMAND"] or (SANDBOX_COMMAND if has_containers else "")
    job = (
        f"--run-dir={run_dir}",
        f"--checkpoints={checkpoints}",
        f"--units={gpus_per_node}",
        f"--cache={contract['PERSISTENT_CACHE']}",
        f"--max-restarts={int(contract['MAX_RESTARTS'])}",  # bash reads 08 as octal
        *((f"--spares={num_nodes - sizes.num_nodes}",) if num_nodes > sizes.num_nodes else ()),
        *container_arguments(contract, run_dir, code_dir),
        *((f"--variables={','.join(launch.profile_variables)}",) if launch.profile_variables else ()),
        f"--sandbox-command={sandbox}",
        *task_image_word(launch),
    )
    return (*submit, str(code_dir / JOB_FILE), *job, "--", python, *driver_argv(launch, code_dir))


def gres_words(gres: str, gpus_per_node: int, *, is_given: bool) -> tuple[str, ...]:
    """Return the option that asks for accelerators; none where the cluster counts none and gives whole nodes.

    sbatch reads SBATCH_GRES, too, and refuses an empty one: a word of the command wins over one of the shell.
    """
    if not gres:
        return ("--gres=none",) if is_given else ()
    has_number = gres.rpartition(":")[2].isdecimal()
    return (f"--gres={gres if has_number else f'{gres}:{gpus_per_node}'}",)


def task_image_word(launch: Launch) -> tuple[str, ...]:
    """Return the word that has every node start one image of the rows before Ray, where our agents will need that."""
    if launch.contract["ENGINE"] == "nemo_rl" or not launch.needs_task_images:
        return ()
    from tools.task_images.inventory import images_of_rows  # images of tasks need all that reads them

    image = next(images_of_rows(launch), None)
    return () if image is None else (f"--task-image={image.absolute()}",)


def start_findings(launch: Launch) -> list[Finding]:
    """Return what keeps a launch from starting on this machine."""
    if launch.contract.is_local or shutil.which("sbatch") is not None:
        return []
    fix = "start it on a login node of the cluster, or set LAUNCHER=local to run on this machine"
    return [found("SLM008", where="LAUNCHER=slurm", wrong="there is no sbatch on this machine", fix=fix)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the words that super_launch.sh passes on."""
    parser = argparse.ArgumentParser(prog="tools.launch.command", description="Make the command of one launch.")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--stage", default="")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args(argv)


@exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Read, examine and prepare a launch; write its command."""
    args = parse(argv)
    launch = read_launch(args.stage, args.overrides, os.environ)
    name = hub_name(launch.environ.get("MODEL_PATH", ""))
    if name and not (args.check or args.dry_run or launch.contract.is_set("DRY_RUN") or errors(launch.findings)):
        with redirect_stdout(sys.stderr):
            fetch_model(name)
        launch = read_launch(args.stage, args.overrides, os.environ)
    if args.check:
        wrong = errors(launch.findings)
        say([str(finding) for finding in wrong])
        return LaunchError.exit_code if wrong else 0
    is_dry = args.dry_run or launch.contract.is_set("DRY_RUN")
    findings = [*examine(launch, is_dry=is_dry), *([] if is_dry else start_findings(launch))]
    findings = forced(findings) if args.force else findings
    say([f"note: {finding}" for finding in findings if finding.severity == "note"])
    refused = errors(findings)
    if not is_dry and refused:
        say([str(finding) for finding in refused])
        return LaunchError.exit_code
    try:
        command = command_of(launch)
        done = unprepared(command) if is_dry else prepare(command)
    except RecipeError as error:
        say([str(finding) for finding in refused] or str(error).splitlines())
        return error.exit_code
    say([*(f"would be refused: {finding}" for finding in refused), *done])
    sys.stdout.write("\0".join(("print" if is_dry else "exec", *command.argv)) + "\0")
    return LaunchError.exit_code if refused else 0


def say(lines: Sequence[str]) -> None:
    """Write messages beside the argv."""
    for line in lines:
        print(f"super_launch.sh: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
