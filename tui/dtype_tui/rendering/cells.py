"""Pieces of text for the screen: dtypes, bars, units. Colour never carries what the text does not."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes, percent

if TYPE_CHECKING:
    from dtype_engine.core.tree import Totals
    from dtype_engine.results.drift import ModuleDrift

COLOURS = {
    "float64": "magenta", "float32": "default", "bfloat16": "cyan", "float16": "green", "float8_e4m3fn": "yellow",
    "float8_e5m2": "yellow", "int8": "red",
}  # fmt: skip
_OF_BLOCKS = {
    ("float", 8): "yellow", ("float", 6): "bright_yellow", ("float", 4): "bright_magenta",
    ("int", 8): "red", ("int", 4): "bright_red",
}  # fmt: skip
"""The same for formats with blocks, by their elements."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
BEST_DB = 80.0


def colour(dtype: str) -> str:
    """A colour of the terminal's own palette for a dtype."""
    row = dtypes.BY_NAME.get(dtype)
    if row is not None and row.blocks is not None:
        return _OF_BLOCKS[row.kind, row.bits]
    return COLOURS.get(dtype.removesuffix(dtypes.PER_TENSOR), "default")


def name_cell(text: str, width: int) -> str:
    """A name from a file, made safe and cut to `width` cells."""
    return truncate(printable(text, max(width, 1)), width)


def truncate(text: str, width: int) -> str:
    """Text of at most `width` cells, with an ellipsis where it was cut. For text whose characters are one cell each."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…" if width > 0 else ""


def wrap_dotted(name: str, width: int) -> str:
    """A module's name in lines of at most `width` cells, broken before a dot where that will do."""
    lines = [""]
    for part in re.split(r"(?=\.)", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def mix_cell(totals: Totals, width: int) -> list[tuple[str, str]]:
    """(text, dtype) pieces of a node's dtypes: `bf16 83 % · f32 17 %`, as many as fit, `+1` for the rest."""
    shares = totals.mix()
    if not shares:
        return []
    if len(shares) == 1:
        return [(dtypes.short_name(shares[0][0]), shares[0][0])]
    pieces: list[tuple[str, str]] = []
    used = 0
    for index, (dtype, share) in enumerate(shares):
        text = f"{dtypes.short_name(dtype)} {percent(share)} %"
        rest = f" +{len(shares) - index}"
        separator = " · " if pieces else ""
        needed = (
            used + len(separator) + len(text) + (len(f" +{len(shares) - index - 1}") if index + 1 < len(shares) else 0)
        )
        if pieces and needed > width:
            pieces.append((rest, ""))
            break
        if separator:
            pieces.append((separator, ""))
        pieces.append((text, dtype))
        used += len(separator) + len(text)
    return pieces


def drift_cell(reading: ModuleDrift | None) -> tuple[str, str]:
    """(SQNR in dB or a word, bar) of a module's drift; a longer bar is more drift."""
    if reading is None:
        return "", ""
    if reading.nonfinite or (reading.sqnr_db is not None and math.isnan(reading.sqnr_db)):
        return "inf/nan", "!!!"
    if reading.sqnr_db is None:
        return "other", ""
    if math.isinf(reading.sqnr_db):
        return ("exact", "") if reading.sqnr_db > 0 else ("-inf", bar(1.0, 3))
    return f"{reading.sqnr_db:.1f}", bar((BEST_DB - reading.sqnr_db) / BEST_DB, 3)


def short_bytes(size: int) -> str:
    """Bytes in at most nine cells: `396.8 KiB`."""
    number, unit = human_bytes(size).split(" ")
    return f"{float(number):.1f} {unit}" if "." in number else f"{number} {unit}"


def bar(share: float, width: int) -> str:
    """A bar of `width` cells, `share` of it filled, to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)
