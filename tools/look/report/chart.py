"""Small charts as inline SVG: no script, no network, colours from the page's style so that dark mode works.

A chart is drawn in fixed coordinates, which the browser scales. Hovering over a step shows its values: each step has an
invisible band whose tip the style sheet reveals.

The pages around them are HTML by Jinja templates: every value is escaped, unless a template or a chart made it. A
template file holds macros, the parts of its pages. Text of models, rows and containers goes through `visible`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tools.look.report.load import Column

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


HERE = Path(__file__).parent
MAX_CHARACTERS = 3000  # of one text; its end is kept, where the final answer usually is
SPECIAL_TOKEN = re.compile(r"&lt;/?(?:\|[\w .:-]{1,40}\||think|tools?|tool_call|tool_response|s|pad|unk|bos|eos)&gt;")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def part(template: str, name: str, /, **values: object) -> Markup:
    """Return a part of a page: the macro `name` of `templates/<template>.html.jinja` with its values."""
    module = _environment().get_template(f"{template}.html.jinja").module
    return Markup(str(getattr(module, name)(**values)))


def page(title: str, body: Sequence[str], head: str = "") -> str:
    """Return a whole page that loads no other file; its parts, and what its head has besides, are markup."""
    style = (HERE / "report.css").read_text(encoding="utf-8")
    inside = Markup("").join(map(Markup, body))
    return part("page", "document", title=title, style=Markup(style), body=inside, head=Markup(head)) + "\n"


def visible(text: str) -> Markup:
    """Escape `text` for HTML, with special tokens marked and control characters written as their code."""
    if len(text) > MAX_CHARACTERS:
        cut = len(text) - MAX_CHARACTERS
        head, tail = text[: MAX_CHARACTERS // 3], text[-(MAX_CHARACTERS - MAX_CHARACTERS // 3) :]
        return Markup(f'{visible(head)}<span class="tok">{cut} more characters</span>{visible(tail)}')
    marked = SPECIAL_TOKEN.sub(lambda found: f'<span class="tok">{found[0]}</span>', escape(text))
    return Markup(CONTROL.sub(lambda found: f'<span class="tok">U+{ord(found[0]):04X}</span>', marked))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {"visible": visible, "number": format_number, "seconds": format_seconds}
    return environment


WIDTH, HEIGHT = 560, 236
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 20, 34
MAX_COLORS = 9
MAX_LABELS = 10


def palette(sizes: Mapping[str, int]) -> dict[str, str]:
    """Return name -> drawn name, in drawing order: the largest parts under their own names, the rest as "N others"."""
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    num_own = MAX_COLORS - 1 if len(by_size) > MAX_COLORS else MAX_COLORS
    own, rest = sorted(by_size[:num_own]), by_size[num_own:]
    return {name: name for name in own} | dict.fromkeys(rest, f"{len(rest)} others")


def drawn_as(names: Mapping[str, str], parts: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return `parts` under their drawn names, so that each has the same color in every figure."""
    width = max(map(len, parts.values()), default=0)
    found = {shown: [0.0] * width for shown in names.values()}
    for name, values in parts.items():
        found[names[name]] = [sum(pair) for pair in zip(found[names[name]], values, strict=True)]
    return found


def bars(
    title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, unit: str = "", axis: str = ""
) -> str:
    """Return a figure with one bar per label and the parts stacked; a part's place decides its color."""
    unit_text = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    if not any(map(any, parts.values())):
        body, legend = '<p class="nothing">nothing recorded</p>', ""
    else:
        body = _bars_svg(title, labels, parts, axis)
        legend = "".join(
            f'<span><i class="key c{color}"></i>{escape(name)} <b>{format_number(sum(values))}</b></span>'
            for color, (name, values) in enumerate(parts.items())
            if any(values)
        )
        legend = legend if len(parts) > 1 else ""
    head = f'<figcaption><h3>{escape(title)}{unit_text}</h3><div class="legend">{legend}</div></figcaption>'
    return f"<figure>{head}{body}</figure>"


def _bars_svg(title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], axis: str) -> str:
    totals = [sum(values[i] for values in parts.values()) for i in range(len(labels))]
    x = Axis(low=0, high=len(labels), ticks=(), start=LEFT, end=WIDTH - RIGHT)
    y = linear_axis(totals, start=HEIGHT - BOTTOM, end=TOP, include=(0.0,))
    drawn = []
    for tick in y.ticks:
        at = y.pixel(tick)
        drawn.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(f'<text class="ytick" x="{x.start - 6}" y="{at + 3.5:.1f}">{format_number(tick)}</text>')
    pixel = (x.end - x.start) / len(labels)
    width = min(0.85 * pixel, 48.0)
    for i in range(len(labels)):
        base = 0.0
        for color, values in enumerate(parts.values()):
            top, bottom = y.pixel(base + values[i]), y.pixel(base)
            if bottom > top:
                left = x.pixel(i + 0.5) - width / 2
                box = f'x="{left:.1f}" y="{top:.2f}" width="{width:.2f}" height="{bottom - top:.2f}"'
                drawn.append(f'<rect class="c{color}" {box}/>')
            base += values[i]
    stride = -(-len(labels) // MAX_LABELS)
    for i in range(0, len(labels), stride):
        place = f'x="{x.pixel(i + 0.5):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        drawn.append(f'<text class="xtick" {place}>{escape(labels[i])}</text>')
    for i, label in enumerate(labels):
        shown = [f"{name} {format_number(values[i])}" for name, values in parts.items() if values[i] > 0]
        tip = " · ".join([label, f"all {format_number(totals[i])}", *(shown if len(parts) > 1 else [])])
        area = f'x="{x.pixel(i):.1f}" y="{TOP}" width="{pixel:.1f}" height="{HEIGHT - BOTTOM - TOP}"'
        text = f'<text x="{WIDTH - RIGHT}" y="{TOP - 8}">{escape(tip)}</text>'
        drawn.append(f'<g class="band"><rect {area}/>{text}</g>')
    name = f'<text class="axis-name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}">{escape(axis)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(drawn)}{name}</svg>'


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
