"""Trying again what failed for a reason that may pass: one policy for every host that files and images come from.

`call_with_retries` repeats a request. A transfer that can go on where it broke off has a loop of its own, and asks
`RetryPolicy.seconds_until_retry` after each failure; it starts to count again when more bytes came.
"""

from __future__ import annotations

import email.utils
import itertools
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Answer = TypeVar("Answer")

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})  # of HTTP; every other error status is final


class TransientError(Exception):
    """A failure that may pass.

    `retry_after` is how many seconds the host asks to be left alone, None when it asks for nothing. `is_reached` says
    whether the host has ever answered: one that never did is more often out of reach than down.
    """

    def __init__(self, reason: str, *, retry_after: float | None = None, is_reached: bool = True) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.is_reached = is_reached


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a request is tried again, and how long to wait before each retry."""

    max_retries: int = 8  # in a row, without progress
    max_unreached_retries: int = 3  # the same for a host that has never answered
    first_seconds: float = 1.0  # before the first retry; doubles with each retry
    max_seconds: float = 60.0  # the longest wait, unless the host asks for a longer one
    max_retry_after: float = 900.0  # a host that asks for a longer wait is given up
    jitter: float = 0.0  # a wait is multiplied by a random number within 1 - jitter and 1 + jitter
    sleep: Callable[[float], None] = field(default=time.sleep)

    def retries_after(self, failure: TransientError) -> int:
        """Return how many retries in a row a failure of this kind gets."""
        return self.max_retries if failure.is_reached else min(self.max_retries, self.max_unreached_retries)

    def asks_too_long(self, failure: TransientError) -> bool:
        """Return whether the host asks for a longer wait than the policy allows."""
        return failure.retry_after is not None and failure.retry_after > self.max_retry_after

    def seconds_until_retry(self, num_failures: int, failure: TransientError) -> float | None:
        """Return how long to wait after `num_failures` failures in a row, the last of them `failure`; None: give up."""
        if self.asks_too_long(failure) or num_failures > self.retries_after(failure):
            return None
        back_off = min(self.first_seconds * 2.0 ** (num_failures - 1), self.max_seconds)
        return max(back_off * random.uniform(1 - self.jitter, 1 + self.jitter), failure.retry_after or 0.0)


def call_with_retries(ask: Callable[[], Answer], wait_or_raise: Callable[[TransientError, int], None]) -> Answer:
    """Return what `ask` returns, called again after each `TransientError`.

    `wait_or_raise` is given the failure and the number of failures so far; it waits, or raises to give up.
    """
    for num_failures in itertools.count(1):
        try:
            return ask()
        except TransientError as failure:
            wait_or_raise(failure, num_failures)
    raise AssertionError("unreachable: `wait_or_raise` ends the loop")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a Retry-After header asks for, given as a number or as a date; None without one."""
    value = str(headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
