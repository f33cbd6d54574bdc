"""The heartbeat of a run: status.json in the run directory, rewritten every second by a thread of the driver.

It says which phase the loop is in and since when, what the collector waits for and, at the end, how the run ended.
`make status` and `make watch` read it. When it is no longer rewritten, the driver has died or hangs.

The same thread is the watchdog of the driver. Every wait of ours has a deadline, but a call into Ray can wait outside
Python for a process that stands still. When nothing moves for longer than they allow, the thread ends the process.

    loop              consumes                        waits for           unblocked by
    heartbeat thread  the state of `Run`              the next period     time; the end of the `with` block
    node thread       Ray's list of nodes             the next look       time; the end of the `with` block

Where the raylet of the driver stands still, calls into Ray wait for it without end. Ray's head declares the node dead
after a minute; the second thread asks it, and ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from recipes.config.keys.derive import max_age
from recipes.config.tree import DeadlinesConfig
from recipes.errors import StalledError
from recipes.files import write_atomically

if TYPE_CHECKING:
    from recipes.grpo.run import Run

logger = logging.getLogger(__name__)

STATUS_FILE = "status.json"
PERIOD_SECONDS = 1.0
_MAX_REASON = 2000  # characters of the error that ended a run
NODE_SECONDS = 10.0  # between two looks at whether Ray takes the driver's node for dead
_STANDING = {psutil.STATUS_STOPPED: "is stopped (SIGSTOP)", psutil.STATUS_DISK_SLEEP: "waits for a disk"}
_PARTS = re.compile(r"raylet$|gcs_server$|ray::|VLLM::")  # of a run, by their titles
_MAX_BEAT_SECONDS = 5.0  # counted of one period: a process that was stopped and goes on has not been stuck


class Heartbeat:
    """Writes the file while its `with` block runs, and ends a process in which nothing moves any more.

    Call `watch` once the run is built. Until then the start may take as long as its own deadlines together.
    """

    def __init__(self, run_dir: Path, deadlines: DeadlinesConfig) -> None:
        self._path = run_dir / STATUS_FILE
        self._deadlines = deadlines
        self._run: Run | None = None
        self._done = threading.Event()
        self._fixed: dict[str, Any] = {
            "status_version": 1,
            "pid": os.getpid(),
            "pid_started": process_start(os.getpid()),
            "host": socket.gethostname(),
            "pid_namespace": pid_namespace(),
            "job_id": os.environ.get("SLURM_JOB_ID", ""),
            "started": time.time(),
        }
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._node_thread = threading.Thread(target=self._watch_node, name="node", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._write("starting")
        self._thread.start()
        self._node_thread.start()
        return self

    def watch(self, run: Run) -> None:
        """Report on this run from now on."""
        self._run = run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write how the run ended."""
        self._done.set()
        self._thread.join(timeout=10)
        if error is not None:
            self._write("failed", f"{type(error).__name__}: {error}"[:_MAX_REASON])
        elif self._run is not None and not self._run.is_complete:
            self._write("stopped", self._run.stop.reason)
        else:
            self._write("done", "" if self._run is None else self._run.shortfall)

    def _beat(self) -> None:
        mark, still, before = self._mark(), 0.0, time.monotonic()
        while not self._done.wait(PERIOD_SECONDS):
            self._write("starting" if self._run is None else "running")
            now = time.monotonic()
            still, before = still + min(now - before, _MAX_BEAT_SECONDS), now
            if (new := self._mark()) != mark:
                mark, still = new, 0.0
            elif still > self._limit():
                self._end(f"nothing moved for {still:.0f} s, more than the deadlines allow,")

    def _watch_node(self) -> None:
        while not self._done.wait(NODE_SECONDS):
            if is_own_node_dead() and not self._done.is_set():
                self._end("Ray's head has had no answer of the raylet of this node for too long,")

    def _mark(self) -> tuple[Any, ...]:
        """Return what changes while a run moves: the step, its phase, and the groups that are ready."""
        if self._run is None:
            return ()
        phase = self._run.recorder.metrics.phase()
        return self._run.state.step, phase and phase[0], len(self._run.buffer)

    def _limit(self) -> float:
        """Return the seconds without a change after which the process ends: every wait of ours ends before.

        Between two changes of the mark a run may push, validate, and validate greedily.
        """
        limits = self._deadlines
        if self._run is None:
            # Judges get addresses beside the placement; models, then workers: see recipes/cluster/starts.py.
            return 3 * limits.placement + 4 * limits.engine_start + limits.checkpoint
        return limits.refit + 2 * limits.progress + limits.train + limits.shutdown

    def _end(self, why: str) -> None:
        """End the process, with where it stands still. What is saved is whole; the launcher ends all that is left."""
        phase = "its start" if self._run is None else f"step {self._run.recorder.metrics.step}, phase {self._mark()[1]}"
        where = _innermost(sys._current_frames().get(threading.main_thread().ident or 0))
        missing = {} if self._run is None else self._run.missing()
        silent = [*standing_still(), *(f"{name}: {reason}" for name, reason in missing.items())]
        who = ", ".join(silent) or "a process of Ray may stand still"
        said = f"{why} in {phase}: the driver waits in {where}; {who}; see logs/latest/ray; start again to resume"
        logger.error("%s", said)
        self._write("failed", f"{StalledError.__name__}: {said}")
        os._exit(StalledError.exit_code)

    def _write(self, state: str, reason: str = "") -> None:
        """Replace the file; a failure is logged and never ends the run."""
        try:
            record = {**self._fixed, "state": state, "reason": reason, "updated": time.time()}
            content = json.dumps(record | ({} if self._run is None else observe(self._run))) + "\n"
            write_atomically(self._path, content.encode(), is_durable=False)  # rewritten each second
        except Exception as error:  # a missed beat is better than none from here on
            logger.warning("%s: not written: %r", self._path, error)


def is_own_node_dead() -> bool:
    """Whether Ray's head takes the node of this process for dead; it may be asked when the raylet does not answer."""
    with suppress(Exception):  # no answer is none
        import ray  # here: this module is also read where there is no Ray

        if ray.is_initialized():
            own = ray.get_runtime_context().get_node_id()
            return any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes())
    return False


def standing_still() -> list[str]:
    """Name the processes of runs of this user on this machine that do not run, and why."""
    found = []
    for process in psutil.process_iter(["name", "cmdline", "status", "uids"]):
        about = process.info
        title = (about["cmdline"] or [about["name"] or ""])[0]
        is_own = about["uids"] is not None and about["uids"].real == os.getuid()
        if is_own and about["status"] in _STANDING and (match := _PARTS.search(title)):
            found.append(f"{title[match.start() :]} (pid {process.pid}) {_STANDING[about['status']]}")
    return found


def _innermost(frame: FrameType | None) -> str:
    """Return the innermost place of this project in which a thread is."""
    while frame is not None and "/recipes/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "a library" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def observe(run: Run) -> dict[str, Any]:
    """Return what a run is doing now. The loop goes on meanwhile, so the values may be from two moments."""
    phase = run.recorder.metrics.phase()
    in_flight = run.collector.num_in_flight()
    ready = Counter(group.target_step + 1 for group in run.buffer.groups())
    return {
        "step": run.state.step,
        "num_steps": run.num_steps,
        "saved_step": run.state.saved_step,
        "phase": "" if phase is None else phase[0],
        "phase_seconds": 0.0 if phase is None else phase[1],
        "prompts_per_step": run.config.grpo.num_prompts_per_step,
        "max_age": max_age(run.config.grpo.async_grpo),
        "ready": {str(step): count for step, count in sorted(ready.items())},  # groups in the buffer, per step
        "in_flight": in_flight,  # groups being sampled
        "missing": run.missing(),  # engines, judges and rollout workers that are not up, with the reason
        "paused": run.collector.paused(),  # environments, with their seconds so far
        "set_aside": run.collector.num_set_aside(),  # prompts that wait for them
        "waiting_for": run.collector.waiting_for() if in_flight else "",
    }


def pid_namespace() -> str:
    """Return the name of this process's PID namespace: a process id of a container means nothing outside it."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 when there is none.

    It tells the process from a later one that was given the same id.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
