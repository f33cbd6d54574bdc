"""Start planned stages one after the other: as jobs that wait for each other, or on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from recipes.stop import EXIT_RESUME
from tools.launch.prepare import Plan
from tools.processes import caught, dies_with_parent

SBATCH_SECONDS = 120.0  # a busy controller may take long, a dead one for ever
KILL = "--kill-on-invalid-dep=yes"  # else a job whose parent failed waits for ever

# make sets these for its programs; the user's shell does not have them.
_OF_MAKE = ("SCALE", "PLATFORM", "LAUNCHER", "SEED", "RESULTS_DIR", "CLUSTER", "ENV_TOML")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage to start."""

    stage: str
    plan: Plan
    after: str  # stage of this pipeline that must end well first; empty when there is none
    variables: Mapping[str, str]


def submission(step: PlannedStage, parent: str = "") -> tuple[str, ...]:
    """Return the submission of a stage that begins when job `parent` has ended well."""
    program, *words = step.plan.argv
    return (program, "--parsable", *((f"--dependency=afterok:{parent}", KILL) if parent else ()), *words)


def paste(steps: Sequence[PlannedStage], words: Sequence[str]) -> list[str]:
    """Return the commands as lines for a shell; `--parsable` prints ID, or ID;CLUSTER."""
    lines = []
    if steps and steps[0].plan.contract.is_local:
        for step in steps:
            given = {name: os.environ.get(name, "") for name in _OF_MAKE} | dict(step.variables)
            assigned = [f"{name}={value}" for name, value in given.items() if value]
            lines.append(shlex.join(["env", *assigned, "./super_launch.sh", step.stage, *words]))
        return lines
    for step in steps:
        job = f'"${{{variable(step.after)}%%;*}}"' if step.after else ""
        words = [shlex.quote(word) for word in submission(step, "@" if job else "")]
        lines.append(f"{variable(step.stage)}=$({' '.join(words).replace(':@', f':{job}', 1)})")
    return lines


def variable(stage: str) -> str:
    """Return the name of the shell variable with a stage's job id."""
    return stage.replace(".", "_")


def submit(steps: Sequence[PlannedStage]) -> int:
    """Submit every stage; after one that fails nothing more is submitted."""
    jobs: dict[str, str] = {}
    for step in steps:
        argv = submission(step, jobs.get(step.after, ""))
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=SBATCH_SECONDS, check=False)
            status, said = done.returncode, done.stderr.strip()
            job_id = done.stdout.strip().split(";")[0]
        except (OSError, subprocess.TimeoutExpired) as error:
            status, said, job_id = 1, str(error), ""
        if status != 0 or not job_id.isdecimal():
            say(f"{step.stage}: sbatch failed: {said or f'status {status}, no job id'}")
            say(f"after it nothing was submitted; look for a job of it: squeue --name={step.plan.run_dir.name}")
            if jobs:
                say(f"submitted: {', '.join(f'{stage} is job {job}' for stage, job in jobs.items())}")
                say(f"to cancel: scancel {' '.join(jobs.values())}")
            return 1
        jobs[step.stage] = job_id
        held = f", after job {jobs[step.after]}" if step.after in jobs else ""
        print(f"{step.stage}: job {job_id}{held}, {step.plan.run_dir}", flush=True)
    print(f"cancel all: scancel {' '.join(jobs.values())}", flush=True)
    return 0


def run_one_by_one(steps: Sequence[PlannedStage], words: Sequence[str]) -> int:
    """Run every stage on this machine; the first that does not end well ends the sequence with its status.

    `words` go to super_launch.sh behind the stage.
    """
    for step in steps:
        env = {**os.environ, **step.variables}
        argv = [str(step.plan.root / "super_launch.sh"), step.stage, *words]
        say(f"{step.stage} begins: {step.plan.run_dir}")
        status = run_forwarding(argv, env)
        if status == EXIT_RESUME:
            say(f"{step.stage} stopped early and saved; start again to resume")
        elif status:
            say(f"{step.stage} ended with status {status}; nothing after it was started")
        if status:
            return status
    say("every stage has reached its end")
    return 0


def run_forwarding(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a program in a session of its own; a signal that ends this process reaches it once, and it decides."""
    with subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=dies_with_parent(signal.SIGTERM),
    ) as child:

        def forward(number: int, _frame: FrameType | None) -> None:
            child.send_signal(number)

        old = {number: signal.signal(number, forward) for number in caught(*_FORWARDED)}
        try:
            status = child.wait()
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status


_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def say(line: str) -> None:
    """Write a message beside the output of the stages."""
    print(f"pipeline: {line}", file=sys.stderr, flush=True)
