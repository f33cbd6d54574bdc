"""Axes: round tick values, numbers as text, and pixels of data coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SAME = 1e-12  # share by which values differ that are one value but for rounding: no ticks lie between them
_NONE = 1e-300  # below this, a number counts as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis: data range, its ticks, and the pixel range it is drawn over."""

    low: float
    high: float
    ticks: tuple[float, ...]
    start: float  # pixel of `low`
    end: float  # pixel of `high`
    is_log: bool = False

    def pixel(self, value: float) -> float:
        """Return the pixel of a data value; a value outside the range gets the pixel of the nearer end."""
        to: Callable[[float], float] = math.log10 if self.is_log else float
        clipped = min(max(value, self.low), self.high)
        share = (to(clipped) - to(self.low)) / (to(self.high) - to(self.low))
        return self.start + share * (self.end - self.start)


def linear_axis(
    values: Sequence[float], *, start: float, end: float, num_ticks: int = 5, include: Sequence[float] = ()
) -> Axis:
    """Return an axis between two round values that contains all `values` and `include`."""
    low, high = min([*values, *include]), max([*values, *include])
    size = max(abs(low), abs(high))
    if high - low <= _SAME * size or size < _NONE:
        pad = size * 0.1 if size >= _NONE else 1.0
        low, high = low - (pad if size >= _NONE else 0.0), high + pad
    step = nice_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, start=start, end=end)


def step_axis(steps: Sequence[int], *, start: float, end: float) -> Axis:
    """Return the axis of training steps, from the first to the last step, with ticks at whole steps."""
    low, high = min(steps), max(steps)
    if low == high:
        return Axis(low=low - 1, high=high + 1, ticks=(float(low),), start=start, end=end)
    step = max(1, round(nice_step((high - low) / 8)))
    ticks = tuple(float(tick) for tick in range(-(-low // step) * step, high + 1, step))
    return Axis(low=low, high=high, ticks=ticks, start=start, end=end)


def log_axis(values: Sequence[float], *, start: float, end: float) -> Axis:
    """Return a base-10 axis over the positive `values`, from one power of ten to another, at most six ticks."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    if first == last:
        first, last = first - 1, last + 1
    stride = max(1, math.ceil((last - first) / 5))
    ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    return Axis(low=10.0**first, high=10.0**last, ticks=ticks, start=start, end=end, is_log=True)


def nice_step(raw: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1.0, 2.0, 2.5, 5.0):
        if factor * power >= raw * (1 - 1e-9):
            return factor * power
    return 10.0 * power


def format_number(value: float, *, digits: int = 3) -> str:
    """Return a number as text with `digits` significant digits: k and M for large, an exponent for tiny numbers."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 9_999_500:
        return f"{value / 1e6:.{digits}g}M"
    if size >= 9_999.5:
        return f"{value / 1e3:.{digits}g}k"
    if size < 1e-3:
        mantissa, exponent = f"{value:.{max(0, digits - 2)}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_seconds(seconds: float) -> str:
    """Return a duration as text: 0.42 s, 5.3 s, 3 min 20 s, 40 min or 2 h 05 min."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest:02d} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
