"""How slow this machine is right now: the factor on the times that the functional tests give themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time

# A start of Python and a hash of 256 MiB: a program's start and its arithmetic, as in everything that the tests start.
_WORK = "import hashlib; hashlib.sha256(bytes(2**28)).digest()"
_QUIET_SECONDS = 0.3  # on an idle machine of two cores
_MOST = 30.0  # a machine that is slower than this is stuck
_GOOD_FOR_SECONDS = 60.0  # so long a figure counts: the load of others comes and goes

_measured: list[float] = []  # when, and the figure


def slowness() -> float:
    """Return how many times longer work takes here than on a quiet machine, at least 1.

    A fixed piece of work is timed with two copies at once, again when the last figure is a minute old. The load average
    counts too: it tells of processes that wait for a disk, or that began after the figure was taken.
    """
    now = time.monotonic()
    if not _measured or now - _measured[0] > _GOOD_FOR_SECONDS:
        copies = [subprocess.Popen([sys.executable, "-c", _WORK]) for _ in range(2)]
        for copy in copies:
            copy.wait()
        _measured[:] = [time.monotonic(), (time.monotonic() - now) / _QUIET_SECONDS]
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(_measured[1], waiting, 1.0), _MOST)


def patiently(seconds: float) -> float:
    """Return the time that takes `seconds` on a quiet machine, here and now."""
    return seconds * slowness()
