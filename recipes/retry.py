"""Trying again what failed for a reason that may pass: one policy for every host, environment and judge.

`call_with_retries` repeats a blocking request, `reply_within` a coroutine within a deadline. A transfer that can go on
where it broke off has a loop of its own, and asks `RetryPolicy.seconds_until_retry` after each failure; it starts to
count again when more bytes came, fast enough.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Answer = TypeVar("Answer")

ALWAYS = sys.maxsize  # as a number of retries


class TransientError(Exception):
    """A failure that may pass.

    `retry_after` is how many seconds the host asks to be left alone, None when it asks for nothing. `is_reached` says
    whether the host has ever answered: one that never did is more often out of reach than down.
    """

    def __init__(self, reason: str, *, retry_after: float | None = None, is_reached: bool = True) -> None:
        super().__init__(reason)
        self.retry_after = retry_after
        self.is_reached = is_reached


class NoReplyError(Exception):
    """A server gave no usable reply in the time and the attempts it had; the message says how the last one failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a request is tried again, and how long to wait before each retry."""

    max_retries: int = 8  # in a row, without progress; `ALWAYS` where a deadline ends the attempts
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
        doublings = min(num_failures - 1, 64)  # more would overflow a float long after the longest wait is reached
        back_off = min(self.first_seconds * 2.0**doublings, self.max_seconds)
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


async def reply_within(seconds: float, ask: Callable[[], Awaitable[Answer]], policy: RetryPolicy) -> Answer:
    """Return what `ask` returns, called again after each `TransientError`, all within `seconds`.

    Raises `NoReplyError` when the time or the policy's retries are used up. Other errors of `ask` end the attempts.
    """
    cause, num_failures = "", 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await ask()
                except TransientError as failure:
                    cause, num_failures = f"; {failure}", num_failures + 1
                    wait = policy.seconds_until_retry(num_failures, failure)
                    if wait is None:
                        asked = f"it asks to wait {failure.retry_after:g} s, " if policy.asks_too_long(failure) else ""
                        raise NoReplyError(f"{failure} ({asked}attempts: {num_failures})") from failure
                await asyncio.sleep(wait)
    except TimeoutError as error:
        raise NoReplyError(f"no reply within {seconds:g} s{cause}") from error


def is_transient(status: int) -> bool:
    """Return whether an HTTP error status may pass: the server is busy, or failed, and did not say that it never will.

    501 (not implemented) and 505 (another version of HTTP) are final although they are above 500.
    """
    return status in (408, 425, 429) or (status >= 500 and status not in (501, 505))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a Retry-After header asks for, given as a number or as a date; None without one."""
    value = str(headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
