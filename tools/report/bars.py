"""Bar charts as inline SVG, in the style of the run report: stacked bars with a legend and a tip per bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tools.report.axis import Axis, format_number, linear_axis

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
        body = _svg(title, labels, parts, axis)
        legend = "".join(
            f'<span><i class="key c{color}"></i>{escape(name)} <b>{format_number(sum(values))}</b></span>'
            for color, (name, values) in enumerate(parts.items())
            if any(values)
        )
        legend = legend if len(parts) > 1 else ""
    head = f'<figcaption><h3>{escape(title)}{unit_text}</h3><div class="legend">{legend}</div></figcaption>'
    return f"<figure>{head}{body}</figure>"


def _svg(title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], axis: str) -> str:
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
