"""How many requests one host gets."""

from __future__ import annotations

import pytest

from tools.task_images.registry.client import RateLimit, RateLimiter


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds


def limiter(clock: Clock, per_second: float, burst: int) -> RateLimiter:
    return RateLimiter(RateLimit(per_second=per_second, burst=burst), clock=clock, sleep=clock.sleep)


def test_a_limit_lets_a_burst_through_and_then_its_rate():
    clock = Clock()
    requests = limiter(clock, 4.0, 3)
    for _ in range(3):
        requests.wait()
    assert clock.now == 0
    for _ in range(8):
        requests.wait()
    assert clock.now == pytest.approx(2.0)
    clock.now += 100  # what is not used is kept up to the burst
    for _ in range(4):
        requests.wait()
    assert clock.now == pytest.approx(102.25)


def test_a_closed_limit_gives_nothing_until_its_time():
    clock = Clock()
    requests = limiter(clock, 1.0, 5)
    requests.close(30)
    requests.close(10)  # an earlier end does not open it
    requests.wait()
    assert clock.now == pytest.approx(30)
