"""The window that shows the values of a tensor: their exponents, and the error of casting them to each dtype."""

from __future__ import annotations

import math

from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, human_count, share_text
from dtype_engine.results.weights import WeightStats
from dtype_engine.service.jobs import InspectTensor
from dtype_tui.rendering.cells import bar
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Answer, Overlay
from dtype_tui.screens.scan_setup import SCANNED

CAST_TO = ("float32", *(dtype for dtype in SCANNED if dtype != "int8@tensor"))
"""The dtypes for which the window shows the error of a cast."""


def weight_screen(answer: Answer[InspectTensor, WeightStats]) -> Overlay:
    """Return a window with the error of casting a tensor to each dtype, and a histogram of the tensor's exponents."""
    experiment, name, stats = answer.experiment, answer.parameters.tensor, answer.result
    table = PlainTable.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(6):
        table.add_column(no_wrap=True, justify="right")
    whole = PlainTable.grid()
    if (found := stats.reference) is not None:
        words = f"SQNR {decibels(found.sqnr_db)}, max |Δ| {found.max_abs:.2e}"
        whole.add_row(Text(f"from {printable(experiment.model.reference, 200)}: {words}", style="bold"))
        whole.add_row("")
    table.add_row("cast to", "SQNR", "max |Δ|", "→ inf", "clipped", "→ 0", "subnormal", style="dim")
    for error in stats.errors:
        counts = (error.overflowed, error.saturated, error.underflowed, error.subnormal)
        cells = [share_text(count, error.elements) for count in counts]
        table.add_row(
            Text(dtypes.short_name(error.dtype), style="bold"),
            "-" if error.sqnr_db is None else decibels(error.sqnr_db),
            f"{error.max_abs:.2e}",
            *cells,
        )
    whole.add_row(table)
    whole.add_row(Text("fp8 and int8 with their scales; shares are of the tensor's values", style="dim"))
    whole.add_row("")
    whole.add_row(exponent_histogram(stats))
    tensor = experiment.tree.canonical(name)
    stored = f", stored {dtypes.short_name(tensor.dtype)}" if tensor else ""
    return Overlay(f"Values of {printable(name, 60)}{stored}", whole)


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
