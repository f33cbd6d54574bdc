"""What state a run is in, from its directory and its jobs: queued, running, done, failed, or dead without a word.

status.json    the driver's heartbeat (recipes/heartbeat.py)
metrics.jsonl  every step
checkpoints/   what a resume would start from
logs/latest/   the last lines of a driver that ended
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from recipes.errors import LaunchError, Problem
from recipes.grpo.checkpoint import complete_checkpoints
from recipes.heartbeat import STATUS_FILE, pid_namespace, process_start
from tools.planning.walltime import slurm_seconds
from tools.report.load import StepRecord, load_steps
from tools.watching.job_state import Queue, SlurmJob, read_queue

_MARKS = (STATUS_FILE, "metrics.jsonl")  # a directory that has one of them is a run's
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
    pulse: Mapping[str, Any]  # status.json; empty when there is none
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
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    @property
    def step(self) -> int:
        """Return the steps done."""
        logged = self.records[-1].step if self.records else 0
        return max(logged, int(self.pulse.get("step", 0)))

    @property
    def num_steps(self) -> int | None:
        steps = self.pulse.get("num_steps") or self.setting("grpo.max_num_steps")
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
        lines = Path("/proc/locks").read_text().splitlines()
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


def ask_slurm(run_dir: Path) -> Queue:
    """Return the jobs of a run; Slurm is not asked about one that was started without it."""
    pulse = _read_json(run_dir / STATUS_FILE)
    if pulse and not pulse["job_id"] and not any((run_dir / "logs").glob("slurm-*.log")):
        return Queue()
    return read_queue(run_dir.name, str(pulse.get("job_id", "")))


def read_run(run_dir: Path, queue: Queue, *, machine: Machine | None = None, now: float | None = None) -> ObservedRun:
    """Read the state of a run; never raises for a run that is half written."""
    now = time.time() if now is None else now
    pulse = _read_json(run_dir / STATUS_FILE)
    records = _steps(run_dir / "metrics.jsonl")
    config = _read_json(run_dir / "resolved.json").get("config", {})
    saved_step, saved_at = _newest_checkpoint(run_dir)
    machine = machine or Machine(socket.gethostname(), pid_namespace(), process_start, is_locked_here)
    status, why = judge(pulse, queue, is_locked=machine.is_locked(run_dir), now=now, machine=machine)
    steps = config.get("grpo", {}).get("max_num_steps")
    if status is RunStatus.UNKNOWN and records and records[-1].step == steps:
        status, why = RunStatus.DONE, f"all {steps} steps are in metrics.jsonl"
    latest = run_dir / "logs" / "latest"
    return ObservedRun(
        run_dir=run_dir,
        now=now,
        status=status,
        why=why,
        pulse=pulse,
        queue=queue,
        records=records,
        config=config,
        stage=str(_read_json(run_dir / "run.lock.json").get("stage", "")),
        saved_step=saved_step,
        saved_at=saved_at,
        attempt=latest.readlink().name if latest.is_symlink() else "",
        last_words=last_words(latest / "driver.log"),
    )


def judge(
    pulse: Mapping[str, Any], queue: Queue, *, is_locked: bool, now: float, machine: Machine
) -> tuple[RunStatus, str]:
    """Decide what a run is doing from its pulse, its jobs and, where the driver ran here, its process."""
    job = queue.running
    asked_at = now if queue.asked_at is None else queue.asked_at
    if job is not None and (job.id != pulse.get("job_id") or _began_after(job, pulse, asked_at)):
        return RunStatus.STARTING, f"{job}; its driver has not started"
    is_over = pulse.get("state") in ("done", "stopped", "failed")
    if is_locked and (not pulse or (is_over and not _is_alive(pulse, machine))):
        return RunStatus.STARTING, "the launcher holds the run directory; its driver has not started"
    if queue.pending is not None and job is None and pulse.get("state") != "done":
        return RunStatus.QUEUED, "; ".join(filter(None, (pulse.get("reason"), str(queue.pending))))
    if is_over:
        return RunStatus(pulse["state"]), pulse["reason"]
    if pulse:
        return _judge_beating(pulse, queue, now=now, machine=machine)
    return RunStatus.UNKNOWN, f"no {STATUS_FILE}: nothing says whether it runs"


def _began_after(job: SlurmJob, pulse: Mapping[str, Any], asked_at: float) -> bool:
    """Whether a job was started again, as a requeued one is, since the driver of this pulse began."""
    elapsed = slurm_seconds(job.elapsed)
    return elapsed is not None and pulse["started"] < asked_at - elapsed - _CLOCK_SECONDS


def _judge_beating(pulse: Mapping[str, Any], queue: Queue, *, now: float, machine: Machine) -> tuple[RunStatus, str]:
    """Decide about a pulse that says `starting` or `running`: it is the driver's last word."""
    who = f"the driver (pid {pulse['pid']} on {pulse['host']})"
    silent = max(0.0, now - pulse["updated"])
    job = queue.job(pulse["job_id"]) if pulse["job_id"] else None
    if job is not None and job.is_over:
        return RunStatus.DEAD, f"{job}; {who} wrote no last word"
    if job is None and pulse["job_id"] and queue.has_answered:
        return RunStatus.DEAD, f"Slurm knows no job {pulse['job_id']} any more; {who} wrote no last word"
    is_here = _is_here(pulse, machine)
    if is_here and not _is_alive(pulse, machine):
        return RunStatus.DEAD, f"{who} is gone without a last word: killed, or the machine restarted"
    if silent <= SILENT_SECONDS:
        return RunStatus(pulse["state"]), ""
    if is_here or job is not None:
        return RunStatus.SILENT, f"{who} is there but has not beaten for {silent:.0f} s: stopped, swapping or stuck"
    return RunStatus.DEAD, f"no beat of {who} for {silent:.0f} s: it ended without a last word or cannot be reached"


def _is_here(pulse: Mapping[str, Any], machine: Machine) -> bool:
    """Whether the driver's process id means something here."""
    return (pulse["host"], pulse.get("pid_namespace")) == (machine.host, machine.pid_namespace)


def _is_alive(pulse: Mapping[str, Any], machine: Machine) -> bool:
    """Whether the process of a pulse still runs; of a process on another machine nothing is known."""
    return _is_here(pulse, machine) and machine.process_start(pulse["pid"]) == pulse["pid_started"]


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


def _read_json(path: Path) -> dict[str, Any]:
    """Return an object, empty when it is not there or half written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
