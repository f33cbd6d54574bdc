"""Start stages one after the other: as jobs that wait for each other, or on this machine.

The stages of a pipeline: the name and the start weights of each, and whether it has reached its end.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from recipes.config.load import Stage, find_stage
from recipes.files import read_object, setting_of
from recipes.grpo.checkpoint import complete_checkpoints
from recipes.stop import EXIT_RESUME
from tools.draft.launch import (
    ROOT,
    Launch,
    experiment,
    is_wide_blend,
    own_tiny_model,
    parents_of,
    read_launch,
    scale_of,
    start_of,
)
from tools.launch.command import Command
from tools.processes import caught, dies_with_parent

CHECKPOINTS = "checkpoints"  # checkpointing.checkpoint_dir where the configuration cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One stage of the pipeline."""

    stage: Stage
    variables: Mapping[str, str]  # of this stage, besides the user's: EXP_NAME, MODEL_PATH
    launch: Launch  # what is submitted
    checked: Launch  # what the doctor examines: the same, with start weights that exist already
    run_dir: Path
    parent: Link | None  # in this pipeline; None = the start weights exist already
    is_finished: bool

    @property
    def is_pending(self) -> bool:
        """Whether the start weights are still to be written, by a stage of this pipeline."""
        return self.parent is not None and not self.parent.is_finished

    @property
    def has_trained(self) -> bool:
        return bool(complete_checkpoints(checkpoint_dir(self.run_dir, self.launch)))

    @property
    def export(self) -> Path:
        """Where the last complete export is, once there is one."""
        return checkpoint_dir(self.run_dir, self.launch) / "latest" / "hf"


def make_links(
    stages: Sequence[Stage], overrides: Sequence[str], environ: Mapping[str, str], root: Path = ROOT
) -> list[Link]:
    """Read the launch of every stage. EXP_NAME goes before the name of each run, MODEL_PATH belongs to the first stage.

    Each stage starts from the nearest of its parents that the pipeline runs: stages between them are left out. At scale
    tiny a stage that trains what its parent's model lacks starts from a model of its own, unless MODEL_PATH is given.
    """
    is_given = bool(environ.get("MODEL_PATH"))
    if not is_given and (start := start_of(stages, environ, root)):
        environ = {**environ, "MODEL_PATH": start}
    results = (root / (environ.get("RESULTS_DIR") or "results")).resolve()
    links: dict[str, Link] = {}
    for stage in stages:
        has_own = not is_given and own_tiny_model(stage, environ) is not None
        parent = None if has_own else next((links[name] for name in parents_of(stage) if name in links), None)
        variables = stage_variables(stage, parent, environ if not links else without_model(environ), results)
        launch = checked = read_launch(stage.id, overrides, {**environ, **variables}, root)
        if parent is not None and not parent.is_finished:
            # The export is still to come. Its tokenizer and its shape are those of the weights that the first
            # unfinished stage starts from.
            there = {**environ, **variables, "MODEL_PATH": parent.checked.contract["MODEL_PATH"]}
            checked = read_launch(stage.id, overrides, there, root)
        run_dir = launch.run_dir or results / variables["EXP_NAME"]
        links[stage.id] = Link(
            stage=stage,
            variables=variables,
            launch=launch,
            checked=checked,
            run_dir=run_dir,
            parent=parent,
            is_finished=(parent is None or parent.is_finished) and is_finished(run_dir, launch),
        )
    return list(links.values())


def stage_variables(stage: Stage, parent: Link | None, environ: Mapping[str, str], results: Path) -> dict[str, str]:
    """Return the name and the start weights of one stage's run; empty weights are left to the stage table."""
    prefix, scale, is_wide = environ.get("EXP_NAME", ""), scale_of(environ), is_wide_blend(environ)

    def run_name(of: Stage) -> str:
        name = experiment(of, scale, is_wide=is_wide)
        return f"{prefix}-{name}" if prefix else name

    model = environ.get("MODEL_PATH", "")
    if parent is not None:
        model = str(parent.export)
    elif prefix and stage.after and not model and own_tiny_model(stage, environ) is None:
        model = str(results / run_name(find_stage(stage.after)) / CHECKPOINTS / "latest" / "hf")
    return {"EXP_NAME": run_name(stage), "MODEL_PATH": model}


def without_model(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without MODEL_PATH, which is for the first stage alone."""
    return {name: value for name, value in environ.items() if name != "MODEL_PATH"}


def is_finished(run_dir: Path, launch: Launch) -> bool:
    """Whether a run has reached its end: its driver said so, and it had as many steps to do as are asked for now."""
    if launch.config is None or not complete_checkpoints(checkpoint_dir(run_dir, launch)):
        return False
    trained = setting_of(read_object(run_dir / "resolved.json"), "config.grpo.max_num_steps")
    return read_object(run_dir / "status.json").get("state") == "done" and trained == launch.config.grpo.max_num_steps


def checkpoint_dir(run_dir: Path, launch: Launch) -> Path:
    """Return the directory of a run's checkpoints."""
    return run_dir / (launch.config.checkpointing.checkpoint_dir if launch.config else CHECKPOINTS)


SBATCH_SECONDS = 120.0  # a busy controller may take long, a dead one for ever
KILL = "--kill-on-invalid-dep=yes"  # else a job whose parent failed waits for ever

# make sets these for its programs; the user's shell does not have them.
_OF_MAKE = ("SCALE", "PLATFORM", "LAUNCHER", "SEED", "RESULTS_DIR", "CLUSTER", "ENV_TOML")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One stage to start."""

    stage: str
    command: Command
    run_dir: Path
    after: str  # stage of this pipeline that must end well first; empty when there is none
    variables: Mapping[str, str]


def submission(step: Step, parent: str = "") -> tuple[str, ...]:
    """Return the submission of a stage that begins when job `parent` has ended well."""
    program, *words = step.command.argv
    return (program, "--parsable", *((f"--dependency=afterok:{parent}", KILL) if parent else ()), *words)


def paste(steps: Sequence[Step], words: Sequence[str], *, is_for_eyes: bool = False) -> list[str]:
    """Return the commands for a shell, `is_for_eyes` with one word a line; `--parsable` prints ID, or ID;CLUSTER."""
    lines, between = [], " \\\n  " if is_for_eyes else " "
    if steps and steps[0].command.launch.contract.is_local:
        for step in steps:
            given = {name: os.environ.get(name, "") for name in _OF_MAKE} | dict(step.variables)
            assigned = [f"{name}={value}" for name, value in given.items() if value]
            lines.append(between.join(map(shlex.quote, ["env", *assigned, "./super_launch.sh", step.stage, *words])))
        return lines
    for step in steps:
        job = f'"${{{variable(step.after)}%%;*}}"' if step.after else ""
        words = [shlex.quote(word) for word in submission(step, "@" if job else "")]
        lines.append(f"{variable(step.stage)}=$({between.join(words).replace(':@', f':{job}', 1)})")
    return lines


def variable(stage: str) -> str:
    """Return the name of the shell variable with a stage's job id."""
    return re.sub("[.-]", "_", stage)


def submit(steps: Sequence[Step]) -> int:
    """Submit every stage; after one that fails nothing more is submitted."""
    jobs: dict[str, str] = {}
    for step in steps:
        argv = submission(step, jobs.get(step.after, ""))
        try:
            done = subprocess.run(
                argv, capture_output=True, encoding="utf-8", errors="replace", timeout=SBATCH_SECONDS, check=False
            )
            status, said = done.returncode, done.stderr.strip()
            job_id = done.stdout.strip().split(";")[0]
        except (OSError, subprocess.TimeoutExpired) as error:
            status, said, job_id = 1, str(error), ""
        if status != 0 or not job_id.isdecimal():
            say(f"{step.stage}: sbatch failed: {said or f'status {status}, no job id'}")
            say(f"after it nothing was submitted; look for a job of it: squeue --name={step.run_dir.name}")
            if jobs:
                say(f"submitted: {', '.join(f'{stage} is job {job}' for stage, job in jobs.items())}")
                say(f"to cancel: scancel {' '.join(jobs.values())}")
            return 1
        jobs[step.stage] = job_id
        held = f", after job {jobs[step.after]}" if step.after in jobs else ""
        print(f"{step.stage}: job {job_id}{held}, {step.run_dir}", flush=True)
    print(f"cancel all: scancel {' '.join(jobs.values())}", flush=True)
    return 0


def run_one_by_one(steps: Sequence[Step], words: Sequence[str]) -> int:
    """Run every stage on this machine; the first that does not end well ends the sequence with its status.

    `words` go to super_launch.sh behind the stage.
    """
    for step in steps:
        env = {**os.environ, **step.variables}
        argv = [str(step.command.launch.root / "super_launch.sh"), step.stage, *words]
        say(f"{step.stage} begins: {step.run_dir}")
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
