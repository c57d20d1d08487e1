"""The window that shows the values of a tensor: their exponents, and the error of casting them to each dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from msgspec.structs import replace
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, human_count, less_error, share_text
from dtype_engine.results.rounding import WeightGain
from dtype_engine.results.weights import WeightStats
from dtype_engine.service.jobs import VALUES, InspectTensor
from dtype_tui.rendering.cells import bar
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Answer, Overlay
from dtype_tui.screens.scan_setup import SCANNED

_LISTED = ("float32", *(dtype for dtype in SCANNED if dtype != "int8@tensor"))
"""The dtypes for which the window always shows the error of a cast."""
_NARROW = 80


def cast_to(planned: str) -> tuple[str, ...]:
    """Return the dtypes for which the window shows the error of a cast. planned: the dtype of the tensor under the current rules.
    If it has a rounding, the dtypes have that rounding, too, as far as they take it.
    """
    row, plain = dtypes.BY_NAME.get(planned), dtypes.unrounded(planned)
    more = (plain,) if plain in dtypes.STORAGE_DTYPES and plain not in _LISTED else ()
    rounding = row.rounding if row is not None else ""
    return tuple(dtypes.rounded(dtype, rounding) or dtype for dtype in (*_LISTED, *more))


class WeightScreen(Overlay):
    """The window with the values of a tensor. asked: the tensor and the dtypes that it shows."""

    KEYS: ClassVar[str] = "r what a rounding gains  Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "gains", "Compute what a rounding such as GPTQ gains in each format"),
    ]

    def __init__(self, title: str, body: RenderableType, asked: InspectTensor) -> None:
        super().__init__(title, body)
        self._asked = asked

    def action_gains(self) -> None:
        self.dismiss(VALUES.ask(replace(self._asked, with_gains=True)))


def weight_screen(answer: Answer[InspectTensor, WeightStats]) -> Overlay:
    """Return a window with the error of casting a tensor to each dtype, and a histogram of the tensor's exponents."""
    experiment, name, stats = answer.experiment, answer.parameters.tensor, answer.result
    whole = PlainTable.grid()
    if (found := stats.reference) is not None:
        words = f"SQNR {decibels(found.sqnr_db)}, max |Δ| {found.max_abs:.2e}"
        whole.add_row(Text(f"from {printable(experiment.model.reference, 200)}: {words}", style="bold"))
        whole.add_row("")
    whole.add_row(_errors(stats, Overlay.content_width(answer.width) < _NARROW))
    whole.add_row(Text("fp8 and int8 with their scales; shares are of the tensor's values", style="dim"))
    if answer.parameters.with_gains:
        whole.add_row(Text(_about_gains(stats.gains), style="dim"))
    whole.add_row("")
    whole.add_row(exponent_histogram(stats))
    tensor = experiment.tree.canonical(name)
    stored = f", stored {dtypes.short_name(tensor.dtype)}" if tensor else ""
    return WeightScreen(f"Values of {printable(name, 60)}{stored}", whole, answer.parameters)


def _errors(stats: WeightStats, narrow: bool) -> Table:
    """Return the table of casts. narrow: whether there is no room for all columns beside that of roundings."""
    heads = ["SQNR", "max |Δ|", "→ inf", "clipped", "→ 0", "subnormal"]
    gains = {dtypes.unrounded(each.dtype): each.gain for each in stats.gains}
    if gains:
        heads = ["SQNR", "rounding", *(heads[2:-1] if narrow else heads[1:])]
    table = PlainTable.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in heads:
        table.add_column(no_wrap=True, justify="right")
    table.add_row("cast to", *heads, style="dim")
    for error in stats.errors:
        cells = {
            "SQNR": "-" if error.sqnr_db is None else decibels(error.sqnr_db),
            "rounding": "-" if (gain := gains.get(error.dtype)) is None else less_error(gain),
            "max |Δ|": f"{error.max_abs:.2e}",
            "→ inf": share_text(error.overflowed, error.elements),
            "clipped": share_text(error.saturated, error.elements),
            "→ 0": share_text(error.underflowed, error.elements),
            "subnormal": share_text(error.subnormal, error.elements),
        }
        table.add_row(Text(dtypes.short_name(error.dtype), style="bold"), *(cells[head] for head in heads))
    return table


def _about_gains(gains: Sequence[WeightGain]) -> str:
    if all(each.gain is None for each in gains):
        return "No matrix product uses this tensor, so no rounding changes it."
    names = ", ".join(dict.fromkeys(dtypes.BY_NAME[each.dtype].rounding for each in gains))
    return f"rounding: the squared error of the layer's output with {names}, over the calibration inputs"


_HISTOGRAM_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def exponent_histogram(stats: WeightStats) -> Text:
    """Return a histogram of absolute values: for each range of exponents, a bar and the `range_mark` of some dtypes."""
    counts = dict(stats.exponents.counts)
    text = Text()
    if not counts:
        return Text("All values are zero." if stats.exponents.zeros else "No values.")
    low, high = min(counts), max(counts)
    step = max(1, -(-(high - low + 1) // 24))
    text.append(f"{'|x| from':<10}{'values':>10}  {'':<24}", style="dim")
    text.append("  ".join(dtypes.short_name(name) for name in _HISTOGRAM_DTYPES) + "\n", style="dim")
    grouped = [
        (first, sum(counts.get(power, 0) for power in range(first, first + step)))
        for first in range(low + (high - low) // step * step, low - 1, -step)
    ]
    tallest = max(count for _, count in grouped)
    for first, count in grouped:
        text.append(f"2^{first:<8}{human_count(count) if count else '-':>10}  ")
        text.append(bar(count / tallest, 24), style="dim")
        for name in _HISTOGRAM_DTYPES:
            row = dtypes.BY_NAME[name]
            mark = range_mark(first, step, row)
            text.append(f"  {mark:<{len(row.short_name)}}", style="bold" if mark not in ("|", ":") else "dim")
        text.append("\n")
    text.append("Without a scale: | in range  : subnormal, fewer bits  0 vanishes  ∞ overflows", style="dim")
    if stats.exponents.zeros or stats.exponents.nonfinite:
        text.append(f"\nzeros {stats.exponents.zeros:,}, not finite {stats.exponents.nonfinite:,}", style="dim")
    return text


def range_mark(first: int, step: int, row: dtypes.DType) -> str:
    """Return a mark for the worst that a cast without scales does to absolute values from 2^first to 2^(first + step).

    "∞": a value overflows. "0": a value becomes zero. ":": a value is subnormal and loses bits. "|": all are in the normal range.
    """
    if first + step - 1 > math.frexp(row.max)[1] - 1:
        return "∞"
    smallest = math.frexp(row.tiny)[1] - 1
    if first < smallest - row.mantissa - 1:
        return "0"
    return ":" if first < smallest else "|"
