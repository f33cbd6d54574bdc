"""The lowest speed of a transfer: a host that sends a byte now and then is given up like one that sends nothing.

The read deadline of a connection starts again with every byte, so that alone it never ends such a transfer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from recipes.retry import TransientError

LOWEST_SPEED = 1000.0  # bytes per second; far below what each of many transfers over one thin line gets
WINDOW_SECONDS = 120.0  # over which this is the average; longer than a pause of a busy host
SHORT_SECONDS = 10.0  # the speed of a connection that breaks off sooner says little


def fast_enough(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pass on the chunks of an answer as they come; raises `TransientError` for bytes slower than the lowest speed.

    The last chunk of a transfer is passed on in any case: what is complete need not be fast.
    """
    begin, received, slow = time.monotonic(), 0, ""
    for chunk in chunks:
        if slow:
            raise TransientError(slow)
        received += len(chunk)
        seconds = time.monotonic() - begin
        if seconds >= WINDOW_SECONDS:
            if received < LOWEST_SPEED * seconds:
                slow = f"too slow ({received} bytes in {seconds:.0f} s; {LOWEST_SPEED:g} bytes a second are the least)"
            begin, received = begin + seconds, 0
        yield chunk


class Tries:
    """Counts the failed tries in a row of one transfer, each of which goes on where the one before it ended.

    A try that came further than all before it starts a new row, unless its bytes came slower than the lowest speed.
    """

    def __init__(self, received: int) -> None:
        """Start at `received` bytes, which an earlier run received."""
        self.furthest = received
        self._num_failures = 0
        self._begin = time.monotonic()

    def chunks(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        """Pass on the chunks of this try's answer, as `fast_enough` does; waits before the answer are not its time."""
        self._begin = time.monotonic()
        yield from fast_enough(answer)

    def failed(self, received: int) -> int:
        """Count the failure of a try that ended at `received` bytes; return the number of failures in a row."""
        gained, seconds = received - self.furthest, time.monotonic() - self._begin
        is_progress = gained > 0 and (seconds < SHORT_SECONDS or gained >= LOWEST_SPEED * seconds)
        self._num_failures = 1 if is_progress else self._num_failures + 1
        self.furthest = max(self.furthest, received)
        return self._num_failures
