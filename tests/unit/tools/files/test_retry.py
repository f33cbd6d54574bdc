"""The retry policy: how often, how long, and when a host is given up."""

from __future__ import annotations

import email.utils
import time

import pytest

from tools.files.retry import RetryPolicy, TransientError, call_with_retries, retry_after

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
