"""When a run ends early: a signal, or the time by which its checkpoint must be saved.

Both are honoured between steps: the step in progress is finished, saved, and the process exits with
`EXIT_RESUME`, which the launcher reads as "run me again", never as success.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

EXIT_RESUME = 75  # EX_TEMPFAIL of sysexits.h


def parse_duration(text: str) -> float:
    """Return the seconds of "DD:HH:MM:SS"."""
    days, hours, minutes, seconds = (int(part) for part in text.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class StopRequest:
    """Becomes true on SIGTERM, SIGINT or SIGUSR1, or when one more step would end after the time limit."""

    def __init__(self, *, must_save_by: str | None, job_start: float, clock: Callable[[], float] = time.time) -> None:
        """Count the limit from `job_start` (Unix seconds), the start of the job and not of this process."""
        self._clock = clock
        self._limit = None if must_save_by is None else job_start + parse_duration(must_save_by)
        self.reason = ""

    def install(self, wake: Callable[[], None]) -> None:
        """Catch the signals; `wake` is called so that a wait for rollouts ends at once."""

        def handle(number: int, _frame: FrameType | None) -> None:
            self.reason = self.reason or f"signal {signal.Signals(number).name}"
            wake()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, handle)

    def requested(self, step_seconds: float) -> bool:
        """Whether to stop before another step of about `step_seconds`."""
        if not self.reason and self._limit is not None and self._clock() + step_seconds >= self._limit:
            self.reason = "checkpointing.checkpoint_must_save_by"
        if self.reason:
            logger.warning("stopping early: %s", self.reason)
        return bool(self.reason)
