"""Draws charts as SVG images for an HTML page. Everything that a color shows is also written as text.

Horizontal positions are percentages of the page's width, so that on a phone the columns get narrower but not the texts.
"""

from __future__ import annotations

import math
from html import escape

from dtype_engine.reports.blocks import BarChart, StackedBars

_COLOURS = ("#4477aa", "#ee8866", "#44aa77", "#aa4488", "#bbaa33", "#888888")
"""Colors that people with color blindness can distinguish (after Paul Tol)."""


def stacked_bars_svg(chart: StackedBars) -> str:
    """Return horizontal bars on one scale. Above each bar is a line with the name of the bar and the names of its segments."""
    largest = max((sum(size for _, size, _ in pieces) for _, pieces in chart.bars), default=0.0)
    if not largest:
        return ""
    colours = {
        name: _COLOURS[index % len(_COLOURS)]
        for index, name in enumerate(dict.fromkeys(name for _, pieces in chart.bars for name, _, _ in pieces))
    }
    drawn = []
    for label, pieces in chart.bars:
        at, rects, keys = 0.0, [], []
        for name, size, words in pieces:
            width, colour = 100 * size / largest, colours[name]
            rects.append(f'<rect x="{at:.2f}%" y="0" width="{width:.2f}%" height="18" fill="{colour}"/>')
            keys.append(f'<span class="key" style="color: {colour}">■</span> {escape(words)}')
            at += width
        drawn += [f"<p>{escape(label)}: {', '.join(keys)}</p>", _svg(18, f"{chart.title}: {label}", rects)]
    return "\n".join(drawn)


def bar_chart_svg(chart: BarChart) -> str:
    """Return a chart with a column for each name, in order, or "" if no value is known. The three worst values are marked, and
    named below the chart.
    """
    values = [value for _, value in chart.points if value is not None]
    if not values:
        return ""
    height = 180
    low = min(0.0, *values)
    high = max(values) if max(values) > low else low + 1
    scale = height / (high - low)
    step = 100 / len(chart.points)
    drawn = []
    for line in _ticks(low, high):
        y = height - (line - low) * scale
        drawn.append(
            f'<line x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{line:g}</text>'
        )
    known = ((value, index) for index, (_, value) in enumerate(chart.points) if value is not None)
    worst = sorted(known, reverse=chart.worst == "highest")[:3]
    marked = {index for _, index in worst}
    for index, (name, value) in enumerate(chart.points):
        if value is None:
            continue
        tall = (value - low) * scale
        colour = "#c33" if index in marked else _COLOURS[0]
        drawn.append(
            f'<rect x="{index * step:.3f}%" y="{height - tall:.1f}" width="{step * 0.8:.3f}%" '
            f'height="{max(tall, 0.5):.1f}" '
            f'fill="{colour}"><title>{escape(name)}: {value:{chart.form}} {escape(chart.unit)}</title></rect>'
        )
    words = [
        f"{chart.worst}: {value:{chart.form}} {chart.unit} {chart.points[index][0]}, column {index + 1} of {len(chart.points)}"
        for value, index in worst
    ]
    paragraphs = [f"<p>{escape(line)}</p>" for line in words]
    return "\n".join(['<div class="plot">', _svg(height, chart.title, drawn), "</div>", *paragraphs])


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step) + 1)]


def _svg(height: int, title: str, drawn: list[str]) -> str:
    head = f'<svg width="100%" height="{height}" role="img"><title>{escape(title)}</title>'
    return "\n".join([head, *drawn, "</svg>"])
