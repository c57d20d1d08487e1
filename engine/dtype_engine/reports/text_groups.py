"""Formats the drift in groups of positions: as cells of tables, as lines of text, and as words for one group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.groups import GROUPINGS, Grouping, PositionGroup, group_label

if TYPE_CHECKING:
    from dtype_engine.results.drift import OutputDrift

HEADINGS = ("count", "mean KL, nats", "part of the KL", "same top-1")


def group_cells(group: PositionGroup) -> tuple[str, ...]:
    """Return the text of a group for each of `HEADINGS`."""
    error = "" if group.kl_mean_se is None else f" ± {group.kl_mean_se:.0e}"
    part = "-" if group.kl_share is None else f"{100 * group.kl_share:.1f} %"
    return f"{group.positions:,}", f"{group.kl_mean:.2e}{error}", part, f"{100 * group.top1_agreement:.2f} %"


def group_rows(output: OutputDrift, grouping: Grouping) -> tuple[tuple[str, ...], ...]:
    """Return a row of a table for each group that has positions: its name, and the cells for `HEADINGS`."""
    return tuple((group_label(name), *group_cells(group)) for name, group in grouping.of(output.groups).items())


def group_lines(output: OutputDrift, *names: str) -> list[str]:
    """Return a table for each of these groupings that was measured."""
    lines = []
    for grouping in map(GROUPINGS.__getitem__, names):
        if rows := group_rows(output, grouping):
            lines += table_lines([(grouping.name, *HEADINGS), *rows], (1, 3, 4), indent="  ")
    return lines


def group_words(output: OutputDrift) -> list[tuple[str, str]]:
    """Return (label, words) of every group: `confidence 0.95–1`, `KL 2.31e-05, 1.1 % of all; top-1 99.10 % of 111`."""
    return [(label, _words(group)) for label, group in labelled_groups(output).items()]


def labelled_groups(output: OutputDrift) -> dict[str, PositionGroup]:
    """Return the groups of all groupings by their labels, such as `confidence 0.95–1`."""
    return {
        group_label(f"{name}:{group}"): found
        for name, grouping in GROUPINGS.items()
        for group, found in grouping.of(output.groups).items()
    }


def _words(group: PositionGroup) -> str:
    count, _, part, top1 = group_cells(group)
    return f"KL {group.kl_mean:.2e}, {part} of all; top-1 {top1} of {count}"  # in one line of a terminal of 80 columns
