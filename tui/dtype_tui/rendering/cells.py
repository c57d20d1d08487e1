"""Short texts for the screen: dtypes, bars, units. The text alone carries all information, so colors can be ignored."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from dtype_engine.core.text import printable
from dtype_engine.core.units import apportioned, human_bytes
from dtype_tui.rendering.palette import TRACK, colour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtype_engine.results.drift import ModuleDrift

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def name_cell(text: str, width: int) -> str:
    """Return a name that comes from a file, with control characters escaped, truncated to `width` cells."""
    return truncate(printable(text, max(width, 1)), width)


def truncate(text: str, width: int) -> str:
    """Return a text truncated to `width` cells, with an ellipsis if it was cut. Every character must be one cell wide."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…" if width > 0 else ""


def wrap_dotted(name: str, width: int) -> str:
    """Return a module's name wrapped to lines of `width` cells. Lines break only before dots, so a line may be longer."""
    lines = [""]
    for part in re.split(r"(?=\.)", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def drift_text(drift: ModuleDrift | None) -> str:
    """Return a module's SQNR in dB without the unit, such as "41.3", a word of up to seven cells ("inf/nan"), or "" for None."""
    if drift is None:
        return ""
    if not drift.is_finite or (drift.sqnr_db is not None and math.isnan(drift.sqnr_db)):
        return "inf/nan"
    if drift.sqnr_db is None:
        return "other"
    if math.isinf(drift.sqnr_db):
        return "exact" if drift.sqnr_db > 0 else "-inf"
    return f"{round(drift.sqnr_db, 1) + 0.0:.1f}"  # never -0.0


def drift_share(sqnr_db: float, scale: tuple[float, float]) -> float:
    """Return the filled share of a module's bar, from 0 (least drift) to 1 (most). sqnr_db: NaN if the output is not finite; the
    bar is then full. scale: the SQNRs at which the bar is full and at which it is empty, such as (20.0, 60.0).
    """
    worst, best = scale
    return 1.0 if math.isnan(sqnr_db) else max(0.0, min(1.0, (best - sqnr_db) / (best - worst)))


def short_bytes(size: int) -> str:
    """Return a size in bytes as text of at most nine cells, such as `396.8 KiB` or `1001 KiB`."""
    number, unit = human_bytes(size).split(" ")
    return f"{float(number):.{1 if float(number) < 999.95 else 0}f} {unit}" if "." in number else f"{number} {unit}"


def bar(share: float, width: int) -> str:
    """Return a bar of `width` cells, filled in steps of an eighth of a cell. share: the filled part, from 0 to 1."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)


def meter(share: float, width: int, colour_name: str) -> list[tuple[str, str]]:
    """Return a low bar of `width` cells, filled in steps of half a cell, as pairs (text, style). Its empty part is a line at the
    bottom, readable without colors. share: the filled part, from 0 to 1; above 0, at least half a cell is filled.
    """
    halves = min(2 * width, max(round(2 * width * share), 1 if share > 0 else 0))
    filled = "▄" * (halves // 2) + "▖" * (halves % 2)
    return [(filled, colour_name), ("▁" * (width - len(filled)), TRACK)]


def stacked(shares: Sequence[tuple[str, float]], width: int, filled: float = 1.0) -> list[tuple[str, str]]:
    """Return a bar of `width` cells with a section for each dtype, in steps of an eighth of a cell, as pairs (text, style). Its
    empty part is a line at the bottom. Sections shorter than an eighth are left out, and all but the two longest in one cell.

    shares: (dtype, its share of the whole), largest first. filled: the part of the bar that the sections fill, from 0 to 1.
    """
    eighths = min(8 * width, max(round(8 * width * filled), 1)) if any(share for _, share in shares) else 0
    shown = [(dtype, share) for dtype, share in shares if share * eighths >= 1] or list(shares[:1])
    lengths = apportioned([share for _, share in shown], eighths)
    drawn = [colour(dtype) for (dtype, _), length in zip(shown, lengths, strict=True) for _ in range(length)]
    drawn += [""] * (-eighths % 8)
    cells = [_cell(drawn[at : at + 8]) for at in range(0, len(drawn), 8)]
    pieces = [("".join(text for text, _ in same), style) for style, same in groupby(cells, itemgetter(1))]
    return [*pieces, ("▁" * (width - len(cells)), TRACK)]


def _cell(eighths: Sequence[str]) -> tuple[str, str]:
    """Return the character and the style of a bar's cell. eighths: the colors of its eighths from left to right, "" for none."""
    kept = dict(Counter(eighths).most_common(2))
    left, *right = sorted(kept, key=eighths.index)
    if not right:
        return "█", left
    length = round(8 * kept[left] / sum(kept.values()))
    return _EIGHTHS[length], f"{left} on {right[0]}" if right[0] else left
