"""How slow this machine is right now: the factor on the times that the functional tests give themselves."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

# A start of Python and a hash of 256 MiB: a program's start and its arithmetic, as in everything that the tests start.
_WORK = "import hashlib; hashlib.sha256(bytes(2**28)).digest()"
_QUIET_SECONDS = 0.3  # on an idle machine of two cores
_MOST = 6.0  # a machine that is slower than this is stuck


@functools.cache
def slowness() -> float:
    """Return how many times longer a fixed piece of work takes here than on a quiet machine, at least 1.

    It is measured once per session, with two copies at once, so that the load of others counts.
    """
    start = time.monotonic()
    copies = [subprocess.Popen([sys.executable, "-c", _WORK]) for _ in range(2)]
    for copy in copies:
        copy.wait()
    return min(max((time.monotonic() - start) / _QUIET_SECONDS, 1.0), _MOST)


def patiently(seconds: float) -> float:
    """Return the time that takes `seconds` on a quiet machine, here."""
    return seconds * slowness()
