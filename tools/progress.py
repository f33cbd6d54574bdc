"""The progress line of a long transfer: how much is done, how fast, how much time is left."""

from __future__ import annotations

import sys
import time
from typing import TextIO

INTERVAL_SECONDS = {True: 0.5, False: 15.0}  # between two lines, on a terminal and in a log


class Progress:
    """Counts the bytes of one transfer and writes its progress to standard error."""

    def __init__(self, name: str, total: int, *, stream: TextIO | None = None) -> None:
        self._name, self._total = name, total
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._done = self._start_bytes = 0
        self._start = self._last = time.monotonic()

    def begin(self, done: int) -> None:
        """Start counting at `done` bytes, which an earlier run received."""
        self._done = self._start_bytes = done
        self._start = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count more bytes."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._last >= INTERVAL_SECONDS[self._terminal]:
            self._last = now
            self._show(now)

    def end(self) -> None:
        """Write the last line."""
        self._show(time.monotonic())
        if self._terminal:
            self._stream.write("\n")

    def _show(self, now: float) -> None:
        seconds = max(now - self._start, 1e-6)
        rate = (self._done - self._start_bytes) / seconds
        left = duration((self._total - self._done) / rate) if rate else "unknown"
        share = 100 * self._done / self._total if self._total else 100.0
        line = (
            f"{self._name}: {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB ({share:.0f} %), "
            f"{rate / 1e6:.1f} MB/s, {left} left"
        )
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """Return a duration as h:mm:ss or m:ss, e.g. 1:02:03 or 2:03."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
