"""Ticks, number formats and pixels."""

from __future__ import annotations

import pytest

from tools.look.report.chart import format_number, format_seconds, linear_axis, log_axis, nice_step, step_axis


def test_linear_axis_covers_the_data_with_round_ticks() -> None:
    axis = linear_axis([0.31, 0.72], start=200, end=20, include=(0.0,))
    assert axis.ticks == pytest.approx((0.0, 0.2, 0.4, 0.6, 0.8))
    assert axis.pixel(0.0) == 200
    assert axis.pixel(0.4) == pytest.approx(110)  # half of 0..0.8
    assert axis.pixel(99) == 20  # clipped


def test_one_value_still_has_an_axis_around_it() -> None:
    for value in (5.0, 0.0, -3.0):
        axis = linear_axis([value], start=0, end=1)
        assert axis.low <= value <= axis.high
        assert axis.low < axis.high
    assert step_axis([7], start=0, end=100).pixel(7) == 50


def test_values_that_differ_by_rounding_alone_have_an_axis_around_them() -> None:
    for low, high in ((999999999.9999999, 1e9), (-0.9999999999999996, -0.9999999999999994)):
        axis = linear_axis([low, high], start=0, end=100)
        assert axis.low <= low <= high <= axis.high
        assert 0 <= axis.pixel(low) <= axis.pixel(high) <= 100


def test_step_axis_ends_at_the_data_and_ticks_whole_steps() -> None:
    axis = step_axis([3, 40], start=0, end=370)
    assert axis.ticks == (5, 10, 15, 20, 25, 30, 35, 40)
    assert axis.pixel(3) == 0
    assert axis.pixel(13) == 100
    assert step_axis([0, 1], start=0, end=1).ticks == (0, 1)


def test_log_axis_spans_powers_of_ten_and_ignores_zero() -> None:
    axis = log_axis([0.0, 2e-6, 3e-3], start=0, end=4)
    assert axis.ticks == pytest.approx((1e-6, 1e-5, 1e-4, 1e-3, 1e-2))
    assert axis.pixel(1e-4) == pytest.approx(2)
    assert axis.pixel(0.0) == 0
    assert len(log_axis([1e-12, 1e3], start=0, end=1).ticks) <= 6
    assert log_axis([1.0], start=0, end=1).low == pytest.approx(0.1)


@pytest.mark.parametrize(("raw", "step"), [(0.11, 0.2), (0.2, 0.2), (0.21, 0.25), (26, 50), (51, 100), (3e-7, 5e-7)])
def test_nice_step(raw: float, step: float) -> None:
    assert nice_step(raw) == pytest.approx(step)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (0.12345, "0.123"),
        (1234.4, "1234"),
        (12345, "12.3k"),
        (12_345_678, "12.3M"),
        (1.2e-6, "1.2e-6"),
        (1e-4, "1e-4"),
        (-0.25, "-0.25"),
        (100, "100"),
    ],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.42 s"),
        (5.31, "5.3 s"),
        (200, "3 min 20 s"),
        (2395, "40 min"),
        (3599, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
