"""When a run ends early: at a signal, before the end of its job, or at the time by which it must have saved.

The run stops between steps: it finishes the step in progress, gives up a validation, saves, and exits with
`EXIT_RESUME`. To the launcher this status means "start me again", never success.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

EXIT_RESUME = 75  # EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Time that is kept free at the end of a job for saving: a tenth of the job, within these bounds.
_MIN_RESERVE_SECONDS, _MAX_RESERVE_SECONDS = 20.0, 600.0


LEAVE_SECONDS = 30.0  # for what libraries do when the interpreter ends
_ANCHOR = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the Unix time in seconds as it goes on from the start of this process, also when the clock is set."""
    return _ANCHOR + time.monotonic()


def parse_duration(text: str) -> float:
    """Return the seconds of "DD:HH:MM:SS"."""
    days, hours, minutes, seconds = (int(part) for part in text.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def leave_within(seconds: float, status: int) -> None:
    """End the process with `status` if it still runs after so many seconds.

    All work is done by then. Ray takes minutes to say goodbye to a head that no longer answers.
    """

    def leave() -> None:
        logger.warning("libraries did not end within %g s; leaving with status %d", seconds, status)
        sys.stdout.flush()
        os._exit(status)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


class StopRequest:
    """Set by SIGTERM, SIGINT or SIGUSR1, or when one more step would end after a time limit. `reason` says which."""

    def __init__(
        self,
        *,
        must_save_by: str | None,
        job_start: float,
        job_end: float | None = None,
        clock: Callable[[], float] = steady_time,
    ) -> None:
        """Count `must_save_by` from `job_start`; both times are the job's, not this process's, in Unix seconds."""
        self._clock = clock
        self._limit = None if must_save_by is None else job_start + parse_duration(must_save_by)
        self._job_start, self._job_end = job_start, job_end
        self._wake: Callable[[], None] = lambda: None
        self.save_seconds = (
            0.0  # of the longest save of the run so far, earlier starts included; before it, as expected
        )
        self.reason = ""

    @classmethod
    def from_environment(cls, must_save_by: str | None) -> StopRequest:
        """Take the times of the Slurm job that this process runs in. Without one the job starts now and has no end."""
        end = os.environ.get("SLURM_JOB_END_TIME")
        return cls(
            must_save_by=must_save_by,
            job_start=float(os.environ.get("SLURM_JOB_START_TIME", steady_time())),
            job_end=float(end) if end else None,
        )

    def install(self) -> None:
        """Handle the signals, including one that came before this process was ready for it."""

        def handle(number: int, _frame: FrameType | None) -> None:
            self.reason = self.reason or f"signal {signal.Signals(number).name}"
            self._wake()

        for number in SIGNALS:
            signal.signal(number, handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake` when a signal comes, or now if one has come, so that a wait for rollouts ends at once."""
        self._wake = wake
        if self.reason:
            wake()

    def requested(self, step_seconds: float) -> bool:
        """Whether to stop before another step of about `step_seconds`."""
        now, times = self._clock(), ""
        step = f"; a step takes about {step_seconds:.0f} s" if step_seconds else ""
        soonest = now + step_seconds
        if not self.reason and self._limit is not None and soonest >= self._limit:
            self.reason = "checkpointing.checkpoint_must_save_by"
            times = f"; {self._limit - now:.0f} s are left{step}"
        if not self.reason and self._job_end is not None:
            reserve = self._reserve(self._job_end)
            if soonest + reserve >= self._job_end:
                self.reason = "the job's time limit"
                times = f"; {self._job_end - now:.0f} s are left, of which {reserve:.0f} s are for saving{step}"
        if self.reason:
            logger.warning("stopping early: %s%s", self.reason, times)
        return bool(self.reason)

    def _reserve(self, job_end: float) -> float:
        """Return the seconds kept free for saving: twice the longest save so far, and at least a share of the job."""
        part = (job_end - self._job_start) / 10
        return max(2 * self.save_seconds, min(max(part, _MIN_RESERVE_SECONDS), _MAX_RESERVE_SECONDS))
