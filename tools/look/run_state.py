"""What state a run is in, from its directory and its jobs: queued, running, done, failed, or dead without a word.

status.json    the driver's heartbeat (recipes/heartbeat.py)
metrics.jsonl  every step
checkpoints/   what a resume would start from
logs/latest/   the last lines of a driver that ended
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from recipes.errors import InputError, LaunchError, Problem
from recipes.files import read_object, setting_of
from recipes.grpo.checkpoint import EXPORT, complete_checkpoints
from recipes.heartbeat import STATUS_FILE, pid_namespace, process_start
from tools.draft.provenance import read_run_lock
from tools.draft.slurm import Queue, SlurmJob, read_queue, slurm_seconds
from tools.look.report.load import StepRecord, load_steps

ROOT = Path(__file__).resolve().parents[2]
_MARKS = (STATUS_FILE, "metrics.jsonl")  # a directory that has one of them is a run's
# What status.json holds: always, and once the loop runs.
_STATES = ("starting", "running", "done", "stopped", "failed")
_ALWAYS: Mapping[str, Any] = {
    **dict.fromkeys(("state", "reason", "host", "job_id"), str),
    **dict.fromkeys(("pid", "pid_started"), int),
    **dict.fromkeys(("started", "updated"), int | float),
}
_OF_A_LOOP: Mapping[str, Any] = {
    **dict.fromkeys(("phase", "waiting_for"), str),
    **dict.fromkeys(("step", "prompts_per_step", "max_age", "in_flight", "set_aside"), int),
    **dict.fromkeys(("ready", "paused", "missing"), dict),
    **{"num_steps": int | None, "saved_step": int | None, "phase_seconds": int | float},
}
_LATER = {"paused", "set_aside", "missing"}  # an older run does not write them
SILENT_SECONDS = 30.0  # the driver writes once a second, and a shared file system may show it half a minute late
_CLOCK_SECONDS = 10.0  # by which the clocks of nodes and controller may differ


class RunStatus(StrEnum):
    """What a run is doing, or how it ended."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # early and saved: a signal, or the time limit
    FAILED = "failed"  # with an error that it reported
    DEAD = "dead"  # without a last word
    SILENT = "silent"  # there, but not beating
    UNKNOWN = "unknown"

    @property
    def is_over(self) -> bool:
        return self in (RunStatus.DONE, RunStatus.STOPPED, RunStatus.FAILED, RunStatus.DEAD, RunStatus.UNKNOWN)

    @property
    def exit_code(self) -> int:
        return int(self in (RunStatus.FAILED, RunStatus.DEAD, RunStatus.SILENT, RunStatus.UNKNOWN))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """Everything known of one run at one moment."""

    run_dir: Path
    now: float
    status: RunStatus
    why: str  # one sentence
    heartbeat: Mapping[str, Any]  # status.json; empty when there is none
    queue: Queue
    records: tuple[StepRecord, ...]
    config: Mapping[str, Any]  # resolved.json's; empty when there is none
    stage: str
    saved_step: int | None  # of the newest complete checkpoint
    saved_at: float
    attempt: str  # attempt_N, the newest
    last_words: tuple[str, ...]  # of driver.log

    def setting(self, key: str) -> Any:
        """Return one value of the resolved configuration by its dotted key, or None."""
        return setting_of(self.config, key)

    @property
    def step(self) -> int:
        """Return the steps done."""
        logged = self.records[-1].step if self.records else 0
        return max(logged, int(self.heartbeat.get("step", 0)))

    @property
    def num_steps(self) -> int | None:
        """The step at which the run ends; unknown until its driver has counted the rows, which may be too few."""
        steps = self.heartbeat.get("num_steps")
        return int(steps) if steps else None

    @property
    def trained(self) -> tuple[StepRecord, ...]:
        return tuple(record for record in self.records if "timing/train/policy_training" in record.values)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine that asks knows of processes and locks; a test gives another."""

    host: str
    pid_namespace: str
    process_start: Callable[[int], int]
    is_locked: Callable[[Path], bool]


def is_locked_here(run_dir: Path) -> bool:
    """Whether a process of this machine holds the run's lock; asked of the kernel, for trying it would take it."""
    try:
        inode = (run_dir / ".lock").stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    # "1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF"; a waiting one has "->" after its number
    return any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in lines)


def find_run(results: Path, name: str) -> Path:
    """Return the directory of a run by name, or the newest; raises `LaunchError` when there is none."""
    runs = sorted(
        (path for path in results.glob("*/") if any((path / mark).exists() for mark in _MARKS)),
        key=lambda path: max((path / mark).stat().st_mtime for mark in _MARKS if (path / mark).exists()),
        reverse=True,
    )
    if name and ((results / name).is_dir() or read_queue(name, "").jobs):
        return results / name
    if not name and runs:
        return runs[0]
    there = ", ".join(path.name for path in runs[:5])
    raise LaunchError(
        Problem(
            where=f"EXP_NAME={name}" if name else str(results),
            wrong=f"there is no run of this name in {results}" if name else "there is no run yet",
            fix=f"choose from: {there}"
            if there
            else "start one: make smoke, or make stage1.1 SCALE=tiny LAUNCHER=local",
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model directory, and what the run that wrote it says; None where no run says."""

    model: Path
    name: str  # run and step, or that of the directory
    trained_from: Path | None = None
    config: Path | None = None  # the file that the run was started with
    rows: Path | None = None  # its held-out rows


def find_checkpoint(given: Path) -> Checkpoint:
    """Return the newest checkpoint of a run, a checkpoint, or an export; raises `InputError` where there is none."""
    saved = complete_checkpoints(given / "checkpoints") if (given / "checkpoints").is_dir() else {}
    path = (saved[max(saved)] if saved else given).resolve()
    model = path / EXPORT if (path / EXPORT).is_dir() else path
    if not (model / "config.json").is_file():
        wrong = f"{given} is no run with a checkpoint, no checkpoint and no model directory"
        fix = "give results/EXP_NAME, or a Hugging Face directory"
        raise InputError(Problem(where="CHECKPOINT", wrong=wrong, fix=fix))
    step = model.parent
    if model.name != EXPORT or step.parent.name != "checkpoints":
        return Checkpoint(model=model, name=model.name)
    run_dir = step.parent.parent
    resolved = read_object(run_dir / "resolved.json")
    files = resolved.get("files")
    return Checkpoint(
        model=model,
        name=f"{run_dir.name}-{step.name}",
        trained_from=_if_there(setting_of(read_run_lock(run_dir), "model.path"), "config.json"),
        config=_if_there(ROOT / str(files[-1]) if isinstance(files, list) and files else None),
        rows=_if_there(setting_of(resolved, "config.data.validation.data_path")),
    )


def _if_there(path: object, inside: str = "") -> Path | None:
    found = Path(path) if isinstance(path, str | Path) and str(path) else None
    return found if found is not None and (found / inside if inside else found).exists() else None


def ask_slurm(run_dir: Path) -> Queue:
    """Return the jobs of a run; Slurm is not asked about one that was started without it."""
    heartbeat = _read_heartbeat(run_dir)
    if heartbeat and not heartbeat["job_id"] and not any((run_dir / "logs").glob("slurm-*.log")):
        return Queue()
    return read_queue(run_dir.name, str(heartbeat.get("job_id", "")))


def read_run(run_dir: Path, queue: Queue, *, machine: Machine | None = None, now: float | None = None) -> ObservedRun:
    """Read the state of a run; never raises for a run that is half written."""
    now = time.time() if now is None else now
    heartbeat = _read_heartbeat(run_dir)
    records = _steps(run_dir / "metrics.jsonl")
    found = read_object(run_dir / "resolved.json").get("config")
    config = found if isinstance(found, dict) else {}
    saved_step, saved_at = _newest_checkpoint(run_dir)
    machine = machine or Machine(socket.gethostname(), pid_namespace(), process_start, is_locked_here)
    status, why = judge(heartbeat, queue, is_locked=machine.is_locked(run_dir), now=now, machine=machine)
    steps = setting_of(config, "grpo.max_num_steps")
    if status is RunStatus.UNKNOWN and records and records[-1].step == steps:
        status, why = RunStatus.DONE, f"all {steps} steps are in metrics.jsonl"
    latest = run_dir / "logs" / "latest"
    return ObservedRun(
        run_dir=run_dir,
        now=now,
        status=status,
        why=why,
        heartbeat=heartbeat,
        queue=queue,
        records=records,
        config=config,
        stage=str(read_object(run_dir / "run.lock.json").get("stage", "")),
        saved_step=saved_step,
        saved_at=saved_at,
        attempt=latest.readlink().name if latest.is_symlink() else "",
        last_words=last_words(latest / "driver.log"),
    )


def judge(
    heartbeat: Mapping[str, Any], queue: Queue, *, is_locked: bool, now: float, machine: Machine
) -> tuple[RunStatus, str]:
    """Decide what a run is doing from its heartbeat, its jobs and, where the driver ran here, its process."""
    job = queue.running
    asked_at = now if queue.asked_at is None else queue.asked_at
    if job is not None and (job.id != heartbeat.get("job_id") or _began_after(job, heartbeat, asked_at)):
        return RunStatus.STARTING, f"{job}; its driver has not started"
    is_over = heartbeat.get("state") in ("done", "stopped", "failed")
    if is_locked and (not heartbeat or (is_over and not _is_alive(heartbeat, machine))):
        return RunStatus.STARTING, "the launcher holds the run directory; its driver has not started"
    if queue.pending is not None and job is None and heartbeat.get("state") != "done":
        return RunStatus.QUEUED, "; ".join(filter(None, (heartbeat.get("reason"), str(queue.pending))))
    if is_over:
        return RunStatus(heartbeat["state"]), heartbeat["reason"]
    if heartbeat:
        return _judge_running(heartbeat, queue, now=now, machine=machine)
    return RunStatus.UNKNOWN, f"no {STATUS_FILE} that can be read: nothing says whether it runs"


def _began_after(job: SlurmJob, heartbeat: Mapping[str, Any], asked_at: float) -> bool:
    """Whether a job was started again, as a requeued one is, since the driver of this heartbeat began."""
    elapsed = slurm_seconds(job.elapsed)
    return elapsed is not None and heartbeat["started"] < asked_at - elapsed - _CLOCK_SECONDS


def _judge_running(
    heartbeat: Mapping[str, Any], queue: Queue, *, now: float, machine: Machine
) -> tuple[RunStatus, str]:
    """Decide about a heartbeat that says `starting` or `running`: it is the driver's last word."""
    who = f"the driver (pid {heartbeat['pid']} on {heartbeat['host']})"
    silent = abs(now - heartbeat["updated"])  # a time ahead of ours is of a clock that was set back since
    job = queue.job(heartbeat["job_id"]) if heartbeat["job_id"] else None
    if job is not None and job.is_over:
        return RunStatus.DEAD, f"{job}; {who} wrote no last word"
    if job is None and heartbeat["job_id"] and queue.has_answered:
        return RunStatus.DEAD, f"Slurm knows no job {heartbeat['job_id']} any more; {who} wrote no last word"
    is_here = _is_here(heartbeat, machine)
    if is_here and not _is_alive(heartbeat, machine):
        return RunStatus.DEAD, f"{who} is gone without a last word: killed, or the machine restarted"
    if silent <= SILENT_SECONDS:
        return RunStatus(heartbeat["state"]), ""
    if is_here or job is not None:
        return RunStatus.SILENT, f"{who} is there but has not beaten for {silent:.0f} s: stopped, swapping or stuck"
    return RunStatus.DEAD, f"no beat of {who} for {silent:.0f} s: it ended without a last word or cannot be reached"


def _is_here(heartbeat: Mapping[str, Any], machine: Machine) -> bool:
    """Whether the driver's process id means something here."""
    return (heartbeat["host"], heartbeat.get("pid_namespace")) == (machine.host, machine.pid_namespace)


def _is_alive(heartbeat: Mapping[str, Any], machine: Machine) -> bool:
    """Whether the process of a heartbeat still runs; of a process on another machine nothing is known."""
    return _is_here(heartbeat, machine) and machine.process_start(heartbeat["pid"]) == heartbeat["pid_started"]


def last_words(log: Path, *, limit: int = 5) -> tuple[str, ...]:
    """Return the last lines of a log that are not empty; none when it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(line.rstrip() for line in lines if line.strip())[-limit:]


def _steps(path: Path) -> tuple[StepRecord, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return _steps_of(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1)
def _steps_of(path: Path, _changed: int, _size: int) -> tuple[StepRecord, ...]:
    """Read a file again only when it has changed: a view that is redrawn asks every second."""
    return load_steps(path)


def _newest_checkpoint(run_dir: Path) -> tuple[int | None, float]:
    """Return step and time of the newest complete checkpoint."""
    found = complete_checkpoints(run_dir / "checkpoints")
    if not found:
        return None, 0.0
    step, path = max(found.items())
    return step, (path / "COMPLETE").stat().st_mtime


def _read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """Return status.json, empty unless it has what every heartbeat writes, each of its kind."""
    heartbeat = read_object(run_dir / STATUS_FILE)
    is_whole = all(isinstance(heartbeat.get(name), kind) for name, kind in _ALWAYS.items())
    has_known_kinds = all(isinstance(heartbeat[name], kind) for name, kind in _OF_A_LOOP.items() if name in heartbeat)
    is_looping = "phase" not in heartbeat or heartbeat.keys() >= _OF_A_LOOP.keys() - _LATER
    return heartbeat if is_whole and has_known_kinds and is_looping and heartbeat["state"] in _STATES else {}
