"""A limit of requests per second, shared by all threads that ask one host (a token bucket)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LONGEST_SLEEP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """How many requests one host gets."""

    per_second: float = 10.0  # on average
    burst: int = 20  # at once


@dataclass(slots=True)
class RateLimiter:
    """Lets the requests to one host through, no more than `limit`."""

    limit: RateLimit
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _closed_until: float = 0.0
    _available: float = field(init=False)  # requests that may be made now
    _updated: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._available, self._updated = float(self.limit.burst), self.clock()

    def wait(self) -> None:
        """Return when the caller may make one request."""
        while (seconds := self._try()) > 0:
            self.sleep(min(seconds, LONGEST_SLEEP_SECONDS))

    def _try(self) -> float:
        """Count one request and return 0, or return the seconds after which to try again."""
        with self._lock:
            now = self.clock()
            if now < self._closed_until:
                return self._closed_until - now
            self._available = min(self.limit.burst, self._available + (now - self._updated) * self.limit.per_second)
            self._updated = now
            if self._available < 1:
                return (1 - self._available) / self.limit.per_second
            self._available -= 1
            return 0.0

    def close(self, seconds: float) -> None:
        """Let no request through for some time."""
        with self._lock:
            self._closed_until = max(self._closed_until, self.clock() + seconds)
