"""Small charts as inline SVG: no script, no network, colours from the page's style so that dark mode works.

A chart is drawn in fixed coordinates, which the browser scales. Hovering over a step shows its values: each step has an
invisible band whose tip the style sheet reveals.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tools.report.axis import Axis, format_number, linear_axis, log_axis, step_axis
from tools.report.load import Column

WIDTH, HEIGHT = 560, 236
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 20, 34
MAX_BANDS = 160  # hover bands of one chart; more steps share a band
SMOOTH_OVER = 24  # a noisy curve with at least so many points gets a running mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve. `color` is an index into the page's palette."""

    label: str
    column: Column
    color: int
    is_dashed: bool = False
    has_points: bool = False
    is_smoothed: bool = False  # draw a running mean over faint raw values
    limits: tuple[Column, Column] | None = None  # lowest and highest values, at the places of `column`, drawn as a band


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    is_log: bool = False,
    include: Sequence[float] = (),
    note: str = "",
) -> str:
    """Return a figure with one curve per series. Empty series are left out; without any data the figure says so."""
    series = [one for one in series if one.column.values]
    if not series:
        return _figure(title, unit, note, "", '<p class="nothing">not measured in this run</p>')
    columns = [column for one in series for column in (one.column, *(one.limits or ()))]
    values = [value for column in columns for value in column.values]
    steps = sorted({step for one in series for step in one.column.steps})
    x = step_axis(steps, start=LEFT, end=WIDTH - RIGHT)
    bottom = HEIGHT - BOTTOM
    if is_log and any(value > 0 for value in values):
        y = log_axis(values, start=bottom, end=TOP)
    else:
        y = linear_axis(values, start=bottom, end=TOP, include=include)
    body = [_grid(x, y), *(_limits(one, x, y) for one in series if one.limits)]
    for one in series:
        body.append(_curve(one, x, y))
    tables = {one.label: dict(zip(one.column.steps, one.column.values, strict=True)) for one in series}
    x_name = series[0].column.along
    body.append(_bands(steps, x, tables, x_name))
    legend = "".join(_legend_entry(one.label, one.color, one.column.last, one.is_dashed) for one in series)
    return _figure(title, unit, note, legend, _svg(title, body, x_name))


def stacked_chart(
    title: str,
    steps: Sequence[int],
    parts: Mapping[str, Sequence[float]],
    *,
    unit: str = "",
    note: str = "",
    highest: float = 0.0,
) -> str:
    """Return a figure with one bar per step and its parts stacked; many steps share bars, which show their means.

    The place of a part in `parts` decides its colour; a part that is always zero is left out. The legend shows means.
    Charts with the same `highest` value have the same axis, so that they can be compared.
    """
    colors = {label: color for color, label in enumerate(parts)}
    parts = {label: values for label, values in parts.items() if any(values)}
    if not steps or not parts:
        return _figure(title, unit, note, "", '<p class="nothing">not measured in this run</p>')
    size = -(-len(steps) // MAX_BANDS)
    bins = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    binned = {label: [sum(values[i] for i in one) / len(one) for one in bins] for label, values in parts.items()}
    totals = [sum(values[i] for values in binned.values()) for i in range(len(bins))]
    x = Axis(low=0, high=len(bins), ticks=(), start=LEFT, end=WIDTH - RIGHT)
    y = linear_axis(totals, start=HEIGHT - BOTTOM, end=TOP, include=(0.0, highest))
    body = [_grid(x, y)]
    pixel = (x.end - x.start) / len(bins)
    gap = min(3.0, 0.15 * pixel)
    bar = min(pixel - gap, 48.0)
    for i in range(len(bins)):
        base, left = 0.0, x.pixel(i + 0.5) - bar / 2
        for label, values in binned.items():
            top = y.pixel(base + values[i])
            body.append(_rect(left, top, bar, y.pixel(base) - top, colors[label]))
            base += values[i]
    labels = [str(steps[one[0]]) if len(one) == 1 else f"{steps[one[0]]}-{steps[one[-1]]}" for one in bins]
    body.append(_bar_labels(labels, x))
    for i, label in enumerate(labels):
        shown = [f"{name} {format_number(values[i])}" for name, values in binned.items() if values[i] > 0]
        tip = " · ".join([f"step {label}", f"all {format_number(totals[i])}", *shown])
        body.append(_band(x.pixel(i), x.pixel(i + 1), tip, None))
    means = {label: sum(values) / len(values) for label, values in parts.items()}
    legend = "".join(_legend_entry(label, colors[label], means[label], False) for label in parts)
    return _figure(title, unit, note, legend, _svg(title, body))


def share_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """Return one horizontal bar of (label, share, style class) parts; only wide parts show their labels."""
    cells = []
    for label, share, style in parts:
        if share <= 0.0005:
            continue
        text = f"{escape(label)} <b>{100 * share:.0f}%</b>" if share >= 0.09 else ""
        title = escape(f"{label}: {100 * share:.1f} %")
        cells.append(f'<span class="part {style}" style="width:{100 * share:.2f}%" title="{title}">{text}</span>')
    return f'<div class="sharebar">{"".join(cells)}</div>'


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of the last `window` values up to it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def _figure(title: str, unit: str, note: str, legend: str, body: str) -> str:
    unit_text = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    caption = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure><figcaption><h3>{escape(title)}{unit_text}</h3><div class="legend">{legend}</div></figcaption>'
        f"{body}{caption}</figure>"
    )


def _svg(title: str, body: Sequence[str], x_name: str = "step") -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}'
        f'<text class="axis-name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}">{escape(x_name)}</text></svg>'
    )


def _legend_entry(label: str, color: int, value: float | None, is_dashed: bool) -> str:
    shown = "" if value is None else f" <b>{format_number(value)}</b>"
    style = "key dashed" if is_dashed else "key"
    return f'<span><i class="{style} c{color}"></i>{escape(label)}{shown}</span>'


def _grid(x: Axis, y: Axis) -> str:
    lines = []
    for tick in y.ticks:
        at = y.pixel(tick)
        lines.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(f'<text class="ytick" x="{x.start - 6}" y="{at + 3.5:.1f}">{format_number(tick)}</text>')
    for tick in x.ticks:
        at = x.pixel(tick)
        lines.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{y.start}" y2="{y.start + 4}"/>')
        lines.append(f'<text class="xtick" x="{at:.1f}" y="{y.start + 16}">{format_number(tick)}</text>')
    lines.append(f'<line class="mark" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>')
    return "".join(lines)


def _limits(one: Series, x: Axis, y: Axis) -> str:
    """Return the band between a series' lowest and highest values."""
    assert one.limits is not None
    low, high = one.limits
    there = _path(low.steps, low.values, x, y)
    back = _path(high.steps[::-1], high.values[::-1], x, y)
    return f'<path class="limits c{one.color}" d="{there}L{back[1:]}Z"/>'


def _curve(one: Series, x: Axis, y: Axis) -> str:
    steps, values = one.column.steps, one.column.values
    smooth = one.is_smoothed and len(values) >= SMOOTH_OVER
    dashed = " dashed" if one.is_dashed else ""
    drawn = []
    if smooth:
        drawn.append(f'<path class="line faint s{one.color}" d="{_path(steps, values, x, y)}"/>')
        values = tuple(running_mean(values, max(5, len(values) // 12)))
    drawn.append(f'<path class="line s{one.color}{dashed}" d="{_path(steps, values, x, y)}"/>')
    if one.has_points or len(values) == 1:
        for step, value in zip(steps, values, strict=True):
            drawn.append(f'<circle class="c{one.color}" cx="{x.pixel(step):.1f}" cy="{y.pixel(value):.1f}" r="3"/>')
    return "".join(drawn)


def _path(steps: Sequence[int], values: Sequence[float], x: Axis, y: Axis) -> str:
    points = (f"{x.pixel(step):.1f} {y.pixel(value):.1f}" for step, value in zip(steps, values, strict=True))
    return "M" + "L".join(points)


def _bands(steps: Sequence[int], x: Axis, tables: Mapping[str, Mapping[int, float]], x_name: str) -> str:
    stride = -(-len(steps) // MAX_BANDS)
    shown = list(steps[::stride])
    centers = [x.pixel(step) for step in shown]
    edges = [x.start, *((a + b) / 2 for a, b in itertools.pairwise(centers)), x.end]
    bands = []
    for i, step in enumerate(shown):
        pieces = [f"{label} {format_number(table[step])}" for label, table in tables.items() if step in table]
        bands.append(_band(edges[i], edges[i + 1], " · ".join([f"{x_name} {step}", *pieces]), centers[i]))
    return "".join(bands)


def _band(left: float, right: float, tip: str, line_at: float | None) -> str:
    bottom = HEIGHT - BOTTOM
    line = "" if line_at is None else f'<line x1="{line_at:.1f}" x2="{line_at:.1f}" y1="{TOP}" y2="{bottom}"/>'
    return (
        f'<g class="band"><rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{bottom - TOP}"/>'
        f'{line}<text x="{WIDTH - RIGHT}" y="{TOP - 8}">{escape(tip)}</text></g>'
    )


def _rect(left: float, top: float, width: float, height: float, color: int) -> str:
    if height <= 0:
        return ""
    return f'<rect class="c{color}" x="{left:.1f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"/>'


def _bar_labels(labels: Sequence[str], x: Axis) -> str:
    stride = max(1, -(-len(labels) // 10))
    y = HEIGHT - BOTTOM + 16
    firsts = [label.split("-")[0] for label in labels]
    return "".join(
        f'<text class="xtick" x="{x.pixel(i + 0.5):.1f}" y="{y}">{escape(firsts[i])}</text>'
        for i in range(0, len(labels), stride)
    )
