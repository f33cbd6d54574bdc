"""Begin a start of a run on the node that drives it: lock the run, check its data, find its start weights.

    ray.sbatch -> this -> barrier -> driver

The job of a later stage is submitted before its parent has saved, so what `.../checkpoints/latest/hf` names is known
only here: the export is checked against its checksums and written into the driver's command and run.lock.json. Then
this becomes the next program, which inherits the lock. Ray starts on all nodes meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import yaml

from recipes.errors import LaunchError, Problem, RecipeError
from recipes.grpo.checkpoint import complete_export, is_export
from recipes.stop import EXIT_RESUME, SIGNALS
from tools.draft import provenance
from tools.draft.run_dir import RunInProgressError, lock_run, point_latest, read_holder, this_process
from tools.draft.slurm import in_progress, live_jobs

MODEL_KEY = "policy.model_name="
DATA_KEYS = ("data.train.data_path=", "data.validation.data_path=")


class StaleLockError(LaunchError):
    """Another job has the lock of the run, but Slurm does not say that it lives: a later start may get it."""

    exit_code = EXIT_RESUME


def begin(log_dir: Path, command: Sequence[str]) -> tuple[str, ...]:
    """Lock the run for this process and those it becomes; return the command with its start weights found.

    `log_dir` is logs/attempt_N of the run.
    """
    run_dir = log_dir.parent.parent
    lock_alone(run_dir)
    point_latest(log_dir)
    require_same_data(run_dir, command)
    found = with_start_weights(run_dir, command)
    provenance.require_same_side_files(run_dir)
    return found


def lock_alone(run_dir: Path) -> None:
    """Lock the run; raises `LaunchError` beside a job that lives, `StaleLockError` when only its lock is left."""
    before = read_holder(run_dir)
    is_other = before is not None and before.job_id not in ("", this_process().job_id)
    # Slurm knows whether the other job lives. On a file system whose locks do not reach other nodes only Slurm does. It
    # is asked first: whoever has locked the run is written down in place of the other.
    if is_other and before is not None:
        refuse_beside(run_dir.name, before.job_id)
    try:
        os.set_inheritable(lock_run(run_dir), True)
    except RunInProgressError as error:
        if not is_other:
            raise
        wrong = f"{before} has its lock, which a file server may keep for a while after the loss of a node"
        raise StaleLockError(Problem(where=run_dir.name, wrong=wrong, fix="wait: this job starts again")) from error


def refuse_beside(name: str, job_id: str) -> None:
    """Raise `LaunchError` when a job lives; a container without Slurm's programs relies on the lock alone.

    A job that is COMPLETING has given up its lock: only its nodes are still being tidied.
    """
    try:
        jobs = [job for job in live_jobs(f"--jobs={job_id}") if job.state != "COMPLETING"]
    except LaunchError as error:
        print(f"begin: {error}", file=sys.stderr)
        return
    if problems := in_progress(name, jobs):
        raise LaunchError(problems)


def with_start_weights(run_dir: Path, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command with the export that `policy.model_name` names replaced by the checkpoint it is now.

    Raises `CheckpointError` when there is no complete one. Start weights that are no export stay as they are.
    """
    words = list(command)
    index = max((index for index, word in enumerate(words) if word.startswith(MODEL_KEY)), default=None)
    if index is None:
        return tuple(words)
    given = Path(str(yaml.safe_load(words[index].removeprefix(MODEL_KEY))))
    if not is_export(given):
        return tuple(words)
    found = complete_export(given)
    for line in provenance.record_start_weights(run_dir, found):
        print(f"begin: differs from the last start: {line}", flush=True)
    print(f"begin: start weights {found}, complete", flush=True)
    words[index] = f"{MODEL_KEY}{json.dumps(str(found))}"
    return tuple(words)


def require_same_data(run_dir: Path, command: Sequence[str]) -> None:
    """Hash the data files again, at each start of the job; raises `LaunchError` for those changed since the launch."""
    given = dict(word.split("=", 1) for word in command if word.startswith(DATA_KEYS))  # the last of a key wins
    paths = [Path(str(found)) for word in given.values() if (found := yaml.safe_load(word)) is not None]
    recorded = provenance.read_run_lock(run_dir).get("data", {})
    problems = []
    for path in dict.fromkeys(paths):
        name = provenance.recorded_name(path, paths, recorded)
        if name and not path.is_file():
            fix = "restore the file, or submit the run again with another one"
            problems.append(Problem(where=str(path), wrong="no such file any more", fix=fix))
        elif name and (found := provenance.data_digest(path)["sha256"]) != recorded[name]["sha256"]:
            expected = f"{recorded[name]['sha256'][:12]}..., as when the job was submitted"
            fix = "restore the file, or submit the run again; data.on_change says how a run with checkpoints goes on"
            problems.append(Problem(where=str(path), got=f"sha256 {found[:12]}...", expected=expected, fix=fix))
    if problems:
        raise LaunchError(problems)


def stop_at_once(_number: int, _frame: FrameType | None) -> None:
    """End as a driver would that was asked to save and stop: there is nothing to save yet."""
    os._exit(EXIT_RESUME)  # the threads that hash files would be waited for


def main(argv: Sequence[str] | None = None) -> int:
    """Begin, then execute the command in place of this process."""
    parser = argparse.ArgumentParser(description="Lock a run, find its start weights, become the next program.")
    parser.add_argument("--log-dir", type=Path, required=True, help="of this start: results/EXP_NAME/logs/attempt_N")
    parser.add_argument("command", nargs="+", help="what to become, after --")
    args = parser.parse_args(argv)
    for number in SIGNALS:
        signal.signal(number, stop_at_once)
    try:
        command = begin(args.log_dir, args.command)
    except RecipeError as error:
        for line in str(error).splitlines():
            print(f"begin: {line}", file=sys.stderr)
        return error.exit_code
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # kept for the next program, which has no handler yet
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
