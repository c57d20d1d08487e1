"""Draws the lines of the module tree: the widths of its columns, and the cells in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from dtype_engine.core import dtypes
from dtype_engine.core.dtypes import padded
from dtype_engine.core.units import human_count
from dtype_engine.recipe import tensor_bytes
from dtype_engine.recipe.fused_words import scale_shared_with
from dtype_engine.reports.text import parameters_text
from dtype_tui.rendering.cells import drift_cell, mix_cell, name_cell, short_bytes, truncate
from dtype_tui.rendering.palette import colour
from dtype_tui.widgets.tree_rows import Row

if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift, OutputDrift
    from dtype_tui.state.experiment import Experiment

COLUMNS = ("params", "bytes", "drift")
"""Columns that the user can hide. The name and the dtype are always shown."""
PLAIN = Style()  # never None: without colours, Textual uses the style of every segment
DIM = Style(dim=True)
BRIGHT = Style(dim=False)
CURSOR = Style(reverse=True)
CURSOR_AWAY = Style(underline=True)
"""The style of the cursor's line while another widget has the focus."""
_BOLD = Style(bold=True)
_LIT = Style(bold=True, color="yellow")
_MATCH = Style(underline=True)
_LOST = Style(bold=True, color="red")
_LOST_MARK = "lost"
"""Marks a warning among the texts of the dtype column. The texts are pairs (text, dtype). A warning about values that casts make
infinite or zero has this word in place of the dtype.
"""


@dataclass(frozen=True, slots=True)
class Columns:
    """Widths of the columns in cells. A column of width 0 is not shown."""

    name: int
    dtype: int
    parameters: int
    size: int
    drift: int
    scan: int = 0
    compared: int = 0


def columns_for(
    width: int, hidden: frozenset[str] = frozenset(), scanned: bool = False, compares: bool = False
) -> Columns:
    """Return column widths for a line of `width` cells. In a narrow line, dtypes are shortened, and parameters and drift omitted.

    hidden: columns to leave out in any case. scanned: whether to add a column for the scan's scores. compares: whether to add a
    column for the baseline's drift and the difference from it.
    """
    scan = 13 if scanned and width >= 50 else 0
    compared = 15 if compares and width - scan >= 60 and "drift" not in hidden else 0
    dtype = 24 if width - scan - compared >= 76 else 13
    parameters = 8 if width - 2 * scan - compared >= 60 and "params" not in hidden else 0
    size = 10 if "bytes" not in hidden else 0
    drift = 12 if width - scan >= 50 and "drift" not in hidden else 0
    name = width - dtype - parameters - size - drift - scan - compared - 1
    return Columns(max(10, name), dtype, parameters, size, drift, scan, compared)


@dataclass(frozen=True, slots=True)
class RowState:
    """The state of a row that determines how the row is drawn."""

    under_cursor: bool
    lit: bool
    """Whether the row is highlighted because the rule that is being typed would match its node."""
    match: bool
    """Whether the row's name matches the filter."""
    opened: bool


def heading(columns: Columns, scan: str = "") -> Strip:
    dtype = "dtype, % of bytes" if columns.dtype >= 20 else "dtype"
    text = f"{' module':<{columns.name}}{dtype:<{columns.dtype}}"
    if columns.parameters:
        text += f"{'params':>{columns.parameters}}"
    if columns.size:
        text += f"{'bytes':>{columns.size}}"
    if columns.drift:
        text += f"{'SQNR dB':>{columns.drift - 4}}    "
    if columns.compared:
        text += f"{'P dB':>6}{'change':>8} "
    if columns.scan:
        apart = "" if columns.drift else " "  # the drift column ends in blanks, but the bytes column does not
        text += f"{apart + truncate(scan, columns.scan - 1):>{columns.scan - 4}}"
    return Strip([Segment(text, DIM)])


def row_segments(experiment: Experiment, row: Row, columns: Columns, state: RowState) -> list[Segment]:
    """Return the styled pieces of a row's text, from left to right."""
    twist, label, about = _name(experiment, row, columns.name, state)
    indent = "  " * row.depth
    marker = "•" if state.lit else "❯" if state.under_cursor else " "
    style = _LIT if state.lit else _MATCH if state.match else _BOLD if row.depth == 0 else PLAIN
    segments = [Segment(f"{marker}{indent}{twist}", DIM if not state.lit else _LIT), Segment(label, style)]
    used = 1 + len(indent) + 2 + len(label)
    mark = experiment.results.losses.marks.get(row.name) if row.tensor is None else None
    if mark is not None:
        mark = truncate(mark, max(0, columns.name - used - 2))
        if len(mark) > 2:
            segments.append(Segment(f"  {mark}", _LOST))
            used += 2 + len(mark)
            about = truncate(about, columns.name - used - 2) if columns.name - used - 2 >= min(len(about), 5) else ""
    if about:
        segments.append(Segment(f"  {about}", DIM))
        used += 2 + len(about)
    segments.append(Segment(" " * max(0, columns.name - used), PLAIN))
    segments += _dtype_segments(experiment, row, columns.dtype)
    if row.tensor is None:
        totals = experiment.totals[row.name]
        parameters = parameters_text(totals) if totals.parameters or totals.unknown else ""
        size = totals.total_bytes
    else:
        tensor = row.tensor
        known = human_count(tensor.parameters) if tensor.parameters else ""
        parameters = "unknown" if tensor.logical_numel == "unknown" else known
        size = tensor_bytes(tensor, experiment.plan.dtypes[tensor.name])
    counted = not row.alias and not (experiment.model.partial and row.tensor is None)
    if columns.parameters:
        segments.append(Segment(f"{parameters if counted else '':>{columns.parameters}}", PLAIN))
    counted = counted and size > 0
    if columns.size:
        segments.append(Segment(f"{short_bytes(size) if counted else '':>{columns.size}}", PLAIN))
    if columns.drift:
        segments.append(_drift_segment(experiment, row, columns.drift))
    if columns.compared:
        segments.append(_compared_segment(experiment, row, columns.compared))
    if columns.scan:
        segments.append(_scan_segment(experiment, row, columns.scan))
    return segments


def _name(experiment: Experiment, row: Row, width: int, state: RowState) -> tuple[str, str, str]:
    """Return (mark of an open or closed node, name, text after the name), which together fit into `width` cells.

    The text after the name is the module's class or the tensor's shape. For a tied weight, it also names the tensor it is tied to.
    """
    width -= 2 * row.depth + 4
    if row.tensor is None:
        expandable = bool(row.module.children or row.module.tensors)
        twist = ("▾ " if state.opened else "▸ ") if expandable else "  "
        label = name_cell(row.label or experiment.model.title, width)
        failed = "failed here" if row.name and row.name == experiment.results.failed_module else ""
        kept = "keep f32" if row.module.keep_in_fp32 else ""
        totals = experiment.totals[row.name]
        elsewhere = experiment.tree.tied_into(row.name) if totals.tied and not totals.nbytes else []
        tied = f"= {', '.join(tensor.name.removesuffix('.weight') for tensor in elsewhere)}" if elsewhere else ""
        about = " ".join(word for word in (failed, tied, kept, row.module.class_name) if word)
    else:
        twist = "  "
        label = name_cell(row.label, width)
        shape = " × ".join(map(str, row.tensor.shape)) or "scalar"
        about = f"= {row.tensor.name}" if row.alias else f"[{shape}]"
    width -= len(label) + 2
    return twist, label, name_cell(about, width) if width >= min(len(about), 5) else ""


def _dtype_segments(experiment: Experiment, row: Row, width: int) -> list[Segment]:
    """Return the dtype column: a module's dtypes with their shares, or a tensor's cast, such as `f32→bf16`, and the layers that
    share the tensor's scale.
    """
    pieces: list[tuple[str, str]]
    weight = row.tensor if row.tensor is not None else row.module.tensors.get("weight")
    shared = scale_shared_with(weight.name, experiment.plan.dtypes) if weight is not None else ""
    if row.tensor is None:
        pieces = mix_cell(experiment.totals[row.name], width - 1)
    else:
        planned = experiment.plan.dtypes[row.tensor.name]
        if planned == row.tensor.dtype:
            pieces = [(dtypes.short_name(planned), planned)]
        else:
            pieces = [(f"{dtypes.short_name(row.tensor.dtype)}→", ""), (dtypes.short_name(planned), planned)]
        if padded(row.tensor.shape, planned):
            pieces.append((" padded", ""))
        if not row.tensor.persistent:
            pieces.append((" not saved", ""))
        mark = experiment.results.losses.marks.get(row.tensor.name)
        if mark is not None:
            left = width - 2 - sum(len(text) for text, _ in pieces)
            pieces.append((f" {mark}" if len(mark) <= left else " ⚠", _LOST_MARK))
    if shared:
        left = width - 1 - sum(len(text) for text, _ in pieces)
        words = next((words for words in (f" scale with {shared}", f" with {shared}") if len(words) <= left), "")
        pieces.append((words, ""))
    segments: list[Segment] = []
    used = 0
    for text, dtype in pieces:
        text = text[: max(0, width - 1 - used)]
        used += len(text)
        style = Style(color=colour(dtype), bold=dtype not in ("", "float32")) if dtype else DIM
        segments.append(Segment(text, _LOST if dtype == _LOST_MARK else style))
    segments.append(Segment(" " * max(0, width - used), PLAIN))
    return segments


def _drift(experiment: Experiment, row: Row) -> ModuleDrift | None:
    """Return the drift of a row's module. For the root of the tree, this is the drift of the model's output.

    Returns None for a tensor.
    """
    if row.tensor is None and not row.name and experiment.results.report is not None:
        return _as_of_module(experiment.results.report.output)
    return experiment.results.modules.get(row.name) if row.tensor is None else None


def _as_of_module(output: OutputDrift) -> ModuleDrift:
    from dtype_engine.results.drift import ModuleDrift  # the first paint does not need it

    return ModuleDrift("", output.sqnr_db, output.max_abs, output.nonfinite)


def _compared_segment(experiment: Experiment, row: Row, width: int) -> Segment:
    """Return two cells of a module as one segment: its SQNR under the baseline recipe, and by how much its SQNR under the current
    recipe is higher (+) or lower (-).
    """
    baseline = experiment.baseline
    if baseline is None or row.tensor is not None:
        return Segment(" " * width, PLAIN)
    from dtype_engine.results.drift import sqnr_gain

    other = experiment.baseline_modules.get(row.name)
    if not row.name:
        other = _as_of_module(baseline.output)
    now = _drift(experiment, row)
    gain = sqnr_gain(now, other) if now is not None and other is not None else None
    change = "" if gain is None else f"{gain:+.1f}"
    return Segment(f"{drift_cell(other)[0]:>6}{change:>8} ".ljust(width), DIM)


def _drift_segment(experiment: Experiment, row: Row, width: int) -> Segment:
    drift = _drift(experiment, row)
    number, drawn = drift_cell(drift)
    text = f"{number:>{width - 4}} {drawn}" if drawn else f"{number:>{width - 4}}"
    bad = drift is not None and (drift.nonfinite > 0 or (drift.sqnr_db is not None and drift.sqnr_db < 20))
    return Segment(f"{text:<{width}}", Style(bold=True, color="red") if bad else PLAIN)


def _scan_segment(experiment: Experiment, row: Row, width: int) -> Segment:
    """Return the node's score for the dtype that the scan shows, and the score's heat bar."""
    number, drawn, heat = experiment.scan.cell(row.name)
    colour_name = "red" if heat > 0.75 else "yellow" if heat > 0.5 else "default"
    return Segment(f"{number:>{width - 4}} {drawn:<3}"[:width].ljust(width), Style(color=colour_name))
