"""Draws charts as SVG, to be embedded in a page. All that a colour shows is also written as text."""

from __future__ import annotations

import math
from html import escape

from dtype_engine.reports.blocks import BarChart, StackedBars

_WIDTH = 900
_COLOURS = ("#4477aa", "#ee8866", "#44aa77", "#aa4488", "#bbaa33", "#888888")
"""Colours that people with colour blindness can distinguish (after Paul Tol)."""


def stacked_bars_svg(chart: StackedBars) -> str:
    """Return a chart of stacked bars on one scale, with the names of the pieces below each bar."""
    largest = max((sum(size for _, size, _ in pieces) for _, pieces in chart.bars), default=0.0)
    if not largest:
        return ""
    colours = {
        name: _COLOURS[index % len(_COLOURS)]
        for index, name in enumerate(dict.fromkeys(name for _, pieces in chart.bars for name, _, _ in pieces))
    }
    left, bar_width = 80, _WIDTH - 90
    drawn = []
    for row, (label, pieces) in enumerate(chart.bars):
        top = 4 + row * 46
        drawn.append(f'<text x="0" y="{top + 14}">{escape(label)}</text>')
        at, written = float(left), left
        for name, size, words in pieces:
            width = bar_width * size / largest
            drawn.append(
                f'<rect x="{at:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="18" fill="{colours[name]}"/>'
            )
            drawn.append(f'<rect x="{written}" y="{top + 25}" width="9" height="9" fill="{colours[name]}"/>')
            drawn.append(f'<text x="{written + 13}" y="{top + 34}">{escape(words)}</text>')
            at += width
            written += 30 + 7 * len(words)
    return _svg(_WIDTH, 46 * len(chart.bars) + 4, chart.title, drawn)


def bar_chart_svg(chart: BarChart) -> str:
    """Return a chart with one column for each name, in order. The three lowest values are marked and named."""
    values = [value for _, value in chart.points if value is not None]
    if not values:
        return ""
    left, top, height = 46, 10, 180
    low = min(0.0, *values)
    high = max(values) if max(values) > low else low + 1
    scale = height / (high - low)
    step = (_WIDTH - left - 10) / len(chart.points)
    foot = top + height
    drawn = []
    for line in _ticks(low, high):
        y = foot - (line - low) * scale
        drawn.append(
            f'<line x1="{left}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity=".15"/>'
        )
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{line:g}</text>')
    lowest = sorted((value, index) for index, (_, value) in enumerate(chart.points) if value is not None)[:3]
    marked = {index for _, index in lowest}
    for index, (name, value) in enumerate(chart.points):
        if value is None:
            continue
        x = left + index * step
        tall = (value - low) * scale
        colour = "#c33" if index in marked else _COLOURS[0]
        drawn.append(
            f'<rect x="{x:.2f}" y="{foot - tall:.1f}" width="{max(step * 0.8, 0.3):.2f}" height="{max(tall, 0.5):.1f}" '
            f'fill="{colour}"><title>{escape(name)}: {value:.2f} {escape(chart.unit)}</title></rect>'
        )
    for row, (value, index) in enumerate(lowest):
        words = f"lowest: {value:.2f} {chart.unit} {chart.points[index][0]}, column {index + 1} of {len(chart.points)}"
        drawn.append(f'<text x="{left}" y="{foot + 18 + 16 * row}">{escape(words)}</text>')
    return _svg(_WIDTH, foot + 10 + 16 * len(lowest), chart.title, drawn)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step) + 1)]


def _svg(width: int, height: int, title: str, drawn: list[str]) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"><title>{escape(title)}</title>'
    return "\n".join([head, *drawn, "</svg>"])
