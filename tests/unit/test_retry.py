"""The retry policy: how often, how long, and when a host is given up."""

from __future__ import annotations

import asyncio
import email.utils
import time

import pytest

from recipes.retry import (
    ALWAYS,
    NoReplyError,
    RetryPolicy,
    TransientError,
    call_with_retries,
    is_transient,
    reply_within,
    retry_after,
)

BROKEN = TransientError("HTTP 503")


def test_waits_double_up_to_the_longest_and_then_it_gives_up():
    policy = RetryPolicy(max_retries=5, first_seconds=2.0, max_seconds=10.0)
    assert [policy.seconds_until_retry(count, BROKEN) for count in range(1, 7)] == [2.0, 4.0, 8.0, 10.0, 10.0, None]


@pytest.mark.parametrize(("asked", "seconds"), [(None, 4.0), (0.0, 4.0), (30.0, 30.0), (901.0, None)])
def test_a_host_is_left_alone_as_long_as_it_asks_for_but_not_for_hours(asked, seconds):
    assert RetryPolicy().seconds_until_retry(3, TransientError("HTTP 429", retry_after=asked)) == seconds


def test_a_host_that_never_answered_is_given_up_sooner():
    policy = RetryPolicy(max_retries=8, max_unreached_retries=2)
    unreached = TransientError("no connection", is_reached=False)
    assert [policy.seconds_until_retry(count, unreached) is None for count in (1, 2, 3)] == [False, False, True]
    assert policy.seconds_until_retry(3, BROKEN) is not None


def test_jitter_spreads_the_waits_around_the_back_off():
    waits = {RetryPolicy(jitter=0.25).seconds_until_retry(3, BROKEN) for _ in range(200)}
    assert len(waits) > 100
    assert all(3.0 <= wait <= 5.0 for wait in waits)


def test_a_request_is_repeated_until_it_is_answered_or_given_up():
    failures: list[int] = []

    def wait_or_raise(failure: TransientError, num_failures: int) -> None:
        failures.append(num_failures)
        if num_failures == 3:
            raise RuntimeError("given up") from failure

    answers = iter([BROKEN, BROKEN, "answer"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, TransientError):
            raise answer
        return answer

    assert call_with_retries(ask, wait_or_raise) == "answer"
    assert failures == [1, 2]
    answers = iter([BROKEN] * 4)
    with pytest.raises(RuntimeError, match="given up"):
        call_with_retries(ask, wait_or_raise)
    assert next(answers) is BROKEN  # the fourth attempt was not made


def test_retry_after_is_a_number_or_a_date():
    date = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert retry_after({"Retry-After": "7.5"}) == 7.5
    assert retry_after({"Retry-After": date}) == pytest.approx(60, abs=2)
    assert [retry_after({"Retry-After": value}) for value in ("", "soon")] == [None, None]
    assert retry_after({}) is None


def test_a_wait_stays_finite_however_often_a_request_has_failed():
    policy = RetryPolicy(max_retries=ALWAYS, max_seconds=16.0)
    assert policy.seconds_until_retry(5000, BROKEN) == 16.0


def test_a_busy_or_failed_server_is_asked_again_and_no_other():
    statuses = (400, 404, 408, 425, 429, 500, 501, 503, 505, 522)
    assert [status for status in statuses if is_transient(status)] == [408, 425, 429, 500, 503, 522]


def asked(*answers: str | Exception, seconds: float = 60.0, policy: RetryPolicy) -> tuple[str, int]:
    """Return the reply and the number of attempts; each attempt takes the next answer, and the last one hangs."""
    attempts = 0

    async def ask() -> str:
        nonlocal attempts
        attempts += 1
        if attempts > len(answers):
            await asyncio.sleep(600)
        answer = answers[attempts - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    reply = asyncio.run(reply_within(seconds, ask, policy))
    return reply, attempts


def test_a_reply_is_waited_for_through_failures_that_pass():
    policy = RetryPolicy(max_retries=2, first_seconds=0.001)
    assert asked(BROKEN, BROKEN, "answer", policy=policy) == ("answer", 3)
    with pytest.raises(NoReplyError, match=r"^HTTP 503 \(attempts: 3\)$"):
        asked(BROKEN, BROKEN, BROKEN, policy=policy)
    with pytest.raises(ValueError, match="final"):
        asked(ValueError("final"), "answer", policy=policy)
    with pytest.raises(NoReplyError, match=r"^HTTP 429 \(it asks to wait 7200 s, attempts: 1\)$"):
        asked(TransientError("HTTP 429", retry_after=7200.0), policy=policy)


@pytest.mark.parametrize(("answers", "message"), [((), r"^no reply within 0\.05 s$"),
                                                  ((BROKEN,), r"^no reply within 0\.05 s; HTTP 503$")])  # fmt: skip
def test_a_reply_that_is_late_is_given_up_with_the_last_failure(answers, message):
    with pytest.raises(NoReplyError, match=message):
        asked(*answers, seconds=0.05, policy=RetryPolicy(first_seconds=0.001))
