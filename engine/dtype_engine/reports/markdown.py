"""Writes a report as Markdown, which can be read as text, kept in a repository and compared line by line."""

from __future__ import annotations

import re

from dtype_engine.core.text import printable
from dtype_engine.reports.blocks import BarChart, Identifier, Pictures, Report, Section, StackedBars, Table, Tile

_BAR = 40
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~$!&]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
"""Matches characters that Markdown or HTML would interpret, including those that make GitHub turn a bare address into a link."""
_ADDRESS = re.compile(r"@(?=\w)")
"""Matches the @ of `@name`, by which GitHub notifies a user, and of addresses, which it makes links. No escape prevents either."""
_PROFILE_ROWS = 60


def as_markdown(report: Report) -> str:
    """Return the report as Markdown. Names are formatted as code, so that they are not interpreted as Markdown or HTML."""
    lines = [f"# {_text(report.title)}", "", *_tiles(report.tiles), _text(report.summary), ""]
    for section in report.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip("\n") + "\n"


def _tiles(tiles: tuple[Tile, ...]) -> list[str]:
    if not tiles:
        return []
    cells = [" · ".join((f"**{_text(tile.value)}**", *map(_text, tile.details))) for tile in tiles]
    return [
        f"| {' | '.join(_text(tile.label) for tile in tiles)} |",
        "|---" * len(tiles) + "|",
        f"| {' | '.join(cells)} |",
        "",
    ]


def _section(section: Section) -> list[str]:
    lines = [f"## {_text(section.title)}", ""]
    for block in section.blocks:
        if isinstance(block, str):
            lines += [_text(block)]
        elif isinstance(block, Table):
            lines += _table(block)
        elif isinstance(block, StackedBars):
            lines += _stacked_bars(block)
        elif isinstance(block, Pictures):
            lines.append(f"{_text(block.title)}: a report in HTML has the pictures.")
        else:
            lines += _bar_chart(block)
        lines.append("")
    return lines


def _text(text: str) -> str:
    if isinstance(text, Identifier):
        return code_span(text).replace("|", "\\|")
    return escaped(text)


def escaped(text: str) -> str:
    """Return one line of text with escapes, so that nothing in it is interpreted as Markdown or HTML."""
    return _ADDRESS.sub("`@`", _SPECIAL.sub(r"\\\1", printable(text, len(text))))


def _in_block(text: str) -> str:
    """Return text for a line of a code block, which it can't end."""
    return printable(text, len(text)).replace("`", "'")


def code_span(text: str) -> str:
    """Return one line of text as Markdown code, whatever characters it contains."""
    text = printable(text, len(text))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _table(table: Table) -> list[str]:
    right = [table.numbers >= 0 and column >= table.numbers for column in range(len(table.head))]
    return [
        f"| {' | '.join(map(_text, table.head))} |",
        f"|{'|'.join('---:' if to_right else '---' for to_right in right)}|",
        *(f"| {' | '.join(map(_text, row))} |" for row in table.rows),
    ]


def _stacked_bars(chart: StackedBars) -> list[str]:
    largest = max((sum(size for _, size, _ in pieces) for _, pieces in chart.bars), default=0.0)
    width = max((len(label) for label, _ in chart.bars), default=0)
    lines = [f"{_text(chart.title)}:", "", "```"]
    for label, pieces in chart.bars:
        bar = "".join(
            "█▓▒░"[index % 4] * round(_BAR * size / largest) for index, (_, size, _) in enumerate(pieces) if largest
        )
        marks = ", ".join(f"{'█▓▒░'[index % 4]} {_in_block(words)}" for index, (_, _, words) in enumerate(pieces))
        lines.append(f"{_in_block(label):<{width}}  {bar}  {marks}")
    return [*lines, "```"]


def _bar_chart(chart: BarChart) -> list[str]:
    points = [(name, value) for name, value in chart.points if value is not None]
    if not points:
        return []
    worst = sorted(points, key=lambda point: point[1], reverse=chart.worst == "highest")[:_PROFILE_ROWS]
    shown = [point for point in points if point in worst]
    largest = max(value for _, value in shown)
    width = max(len(name) for name, _ in shown)
    less = f", the {len(shown)} {chart.worst} of {len(points)}" if len(shown) < len(points) else ""
    lines = [f"{_text(chart.title)}, in {chart.unit}{less}:", "", "```"]
    for name, value in shown:
        bar = "█" * max(0, round(_BAR * value / largest)) if largest > 0 else ""
        lines.append(f"{_in_block(name):<{width}}  {value:7{chart.form}}  {bar}")
    return [*lines, "```"]
