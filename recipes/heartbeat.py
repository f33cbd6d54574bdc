"""The heartbeat of a run: status.json in the run directory, rewritten every second by a thread of the driver.

It says which phase the loop is in and since when, what the collector waits for and, at the end, how the run ended.
`make status` and `make watch` read it. When it is no longer rewritten, the driver has died or hangs.

    loop              consumes                        waits for           unblocked by
    heartbeat thread  the state of `Run`              the next period     time; the end of the `with` block
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from recipes.config.keys.derive import max_age
from recipes.files import write_atomically

if TYPE_CHECKING:
    from recipes.grpo.run import Run

logger = logging.getLogger(__name__)

STATUS_FILE = "status.json"
PERIOD_SECONDS = 1.0
_MAX_REASON = 2000  # characters of the error that ended a run


class Heartbeat:
    """Writes the file while its `with` block runs. Call `watch` once the run is built."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATUS_FILE
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

    def __enter__(self) -> Heartbeat:
        self._write("starting")
        self._thread.start()
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
            self._write("done")

    def _beat(self) -> None:
        while not self._done.wait(PERIOD_SECONDS):
            self._write("starting" if self._run is None else "running")

    def _write(self, state: str, reason: str = "") -> None:
        """Replace the file; a failure is logged and never ends the run."""
        try:
            record = {**self._fixed, "state": state, "reason": reason, "updated": time.time()}
            content = json.dumps(record | ({} if self._run is None else observe(self._run))) + "\n"
            write_atomically(self._path, content.encode(), is_durable=False)  # rewritten each second
        except Exception as error:  # a missed beat is better than none from here on
            logger.warning("%s: not written: %r", self._path, error)


def observe(run: Run) -> dict[str, Any]:
    """Return what a run is doing now. The loop goes on meanwhile, so the values may be from two moments."""
    phase = run.metrics.phase()
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
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
