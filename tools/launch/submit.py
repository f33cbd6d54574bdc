"""Write the command that starts a planned run: the supervisor on this machine, or the submission to Slurm."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.config.keys.derive import Derived
from recipes.errors import LaunchError, Problem
from tools.doctor.task_containers import images_of_rows
from tools.planning.contract import Contract
from tools.planning.draft import Draft
from tools.planning.mounts import container_arguments
from tools.planning.walltime import signal_option

JOB_FILE = Path("tools/job/ray.sbatch")
SANDBOX_COMMAND = "/start-with-nginx.sh"  # of the published sandbox image


def local_argv(run_dir: Path, sizes: Derived, driver: Sequence[str]) -> tuple[str, ...]:
    """Return the supervisor of a one-node cluster on this machine, and the driver (its words after `python`)."""
    return (
        *(sys.executable, "-m", "tools.job.local"),
        f"--run-dir={run_dir}",
        f"--num-units={sizes.train_gpus + sizes.generation_gpus + sizes.judge_units}",
        *("--", sys.executable, *driver),
    )


def sbatch_argv(draft: Draft, sizes: Derived, run_dir: Path, code_dir: Path, driver: Sequence[str]) -> tuple[str, ...]:
    """Return the submission: resources computed from the configuration, then the job file and its arguments."""
    contract = draft.contract
    checkpoints = run_dir / (draft.config.checkpointing.checkpoint_dir if draft.config else "checkpoints")
    gpus_per_node = sizes.total_gpus // sizes.num_nodes
    submit = (
        "sbatch",
        f"--job-name={contract['EXP_NAME']}",
        f"--account={contract['SLURM_ACCOUNT']}",
        f"--partition={contract['SLURM_PARTITION']}",
        f"--nodes={num_nodes(contract, sizes)}",
        f"--gres=gpu:{gpus_per_node}",
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
        *container_arguments(contract, run_dir, code_dir),
        *((f"--variables={','.join(draft.profile_variables)}",) if draft.profile_variables else ()),
        f"--sandbox-command={sandbox}",
        *task_image_word(draft),
    )
    return (*submit, str(code_dir / JOB_FILE), *job, "--", python, *driver)


def task_image_word(draft: Draft) -> tuple[str, ...]:
    """Return the word that has every node start one image of the rows before Ray, where our agents will need that."""
    if draft.contract["ENGINE"] == "nemo_rl":
        return ()
    image = next(images_of_rows(draft), None)
    return () if image is None else (f"--task-image={image.absolute()}",)


def num_nodes(contract: Contract, sizes: Derived) -> int:
    """Return the nodes to ask for: what the configuration needs, or more; raises `LaunchError` for fewer."""
    asked = int(contract["SBATCH_NUM_NODES"] or sizes.num_nodes)
    if asked < sizes.num_nodes:
        needs = (
            f"{sizes.num_train_nodes} train + {sizes.num_generation_nodes} generation + {sizes.num_judge_nodes} judges"
        )
        raise LaunchError(
            Problem(
                where="SBATCH_NUM_NODES",
                got=str(asked),
                expected=f"at least {sizes.num_nodes} ({needs})",
                fix="unset it, or change cluster.num_nodes and generation.colocated.resources.num_nodes",
            )
        )
    return asked
