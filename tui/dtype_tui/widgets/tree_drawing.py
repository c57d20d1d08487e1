"""Draws the lines of the module tree: the cells in its columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import WORDS
from dtype_engine.core.dtypes import padded
from dtype_engine.core.units import human_count, percent, signed
from dtype_engine.recipe import tensor_bytes
from dtype_engine.recipe.fused_words import scale_shared_with
from dtype_tui.rendering.cells import drift_share, drift_text, meter, name_cell, short_bytes, stacked, truncate
from dtype_tui.rendering.palette import ACCENT, heat, pill, sqnr_colour
from dtype_tui.widgets import cursor
from dtype_tui.widgets.tree_columns import EDGE, Columns
from dtype_tui.widgets.tree_rows import Row, worst_drift

if TYPE_CHECKING:
    from dtype_engine.core.kv_cache import KVCacheTensor
    from dtype_engine.core.tree import Module, Totals
    from dtype_engine.results.drift import ModuleDrift, OutputDrift
    from dtype_tui.state.experiment import Experiment

PLAIN = Style()  # never None: without colors, Textual uses the style of every segment
DIM = Style(dim=True)
_BOLD = Style(bold=True)
_LIT = Style(bold=True, color=ACCENT)
_MATCH = Style(underline=True)
_LOST = Style(bold=True, color="red")


class RowState(msgspec.Struct, frozen=True):
    """The state of a row that determines how the row is drawn."""

    under_cursor: bool
    lit: bool
    """Whether the row is highlighted because the rule that is being typed would match its node."""
    match: bool
    opened: bool
    inside: int = 0
    """How many tensors below a closed node the rule that is being typed would cast."""


class _Line:
    """A line of the tree, built from left to right."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.width = 0

    def add(self, text: str, style: Style = PLAIN) -> None:
        self.segments.append(Segment(text, style))
        self.width += len(text)

    def add_pieces(self, pieces: Iterable[tuple[str, str]]) -> None:
        for text, name in pieces:
            if text:
                self.add(text, _style(name))

    def fill(self, width: int) -> None:
        """Add blanks until the line has `width` cells, in the style of the text before, since changes of style cost bytes."""
        if width > self.width:
            before = self.segments[-1].style if self.segments else None
            plain = before is None or before.bgcolor is not None or before.underline
            self.add(" " * (width - self.width), PLAIN if plain or before is None else before)


@lru_cache
def _style(name: str) -> Style:
    return Style.parse(name)


def heading(columns: Columns, scan: str = "", baseline: str = "") -> Strip:
    """Return the line above the rows. scan: the heading of the scores. baseline: the mark of the baseline recipe, such as "#4"."""
    dtype = "dtype, % of bytes" if columns.dtype >= 20 else "dtype"
    text = f"{'  module':<{columns.name}}{dtype:<{columns.dtype}}"
    for width, words in (
        (columns.parameters, "params"),
        (columns.size, "bytes"),
        (columns.share, ""),
        (columns.drift, "SQNR"),
        (columns.track, ""),
        (columns.other, f"vs {baseline}"),
        (columns.change, "change" if columns.other else f"vs {baseline}"),
        (columns.scan, truncate(scan, columns.scan - 1)),
        (columns.heat, ""),
    ):
        text += f"{words if width else '':>{width}}"
    return Strip([Segment(text, DIM)])


def row_segments(experiment: Experiment, row: Row, columns: Columns, state: RowState) -> list[Segment]:
    line = _Line()
    line.add(cursor.EDGE if state.under_cursor else " ", cursor.EDGE_STYLE if state.under_cursor else PLAIN)
    _add_name(line, experiment, row, columns.name, state)
    end = columns.name + columns.dtype
    _add_dtype(line, experiment, row, end - 1)
    line.fill(end)
    _add_size(line, experiment, row, columns)
    _add_drift(line, experiment, row, columns)
    if columns.other or columns.change:
        _add_comparison(line, experiment, row, columns)
    if columns.scan:
        _add_score(line, experiment, row, columns)
    return line.segments


def _add_name(line: _Line, experiment: Experiment, row: Row, end: int, state: RowState) -> None:
    """Add the name column. Text up to the name has one style, because every change of style costs bytes when the cursor moves."""
    twist, label, about = _name(experiment, row, end, state)
    lit, strong = state.lit or state.inside > 0, row.depth == 0 or state.under_cursor
    style = _LIT if lit else _MATCH if state.match else _BOLD if strong else PLAIN
    before = ("•" if lit else " ") + "  " * row.depth + twist
    if style.underline:
        line.add(before)
        before = ""
    line.add(before + label, style)
    mark = truncate(_loss_mark(experiment, row), max(0, end - line.width - 3)) if row.tensor is None else ""
    if len(mark) > 2:
        line.add(f"  {mark}", _LOST)
        left = end - line.width - 3
        about = truncate(about, left) if left >= min(len(about), 5) else ""
    if state.inside and not state.lit:
        line.add(truncate(f"  {state.inside:,} inside", end - line.width - 1), _LIT)
    elif about:
        line.add(f"  {about}", DIM)
    line.fill(end)


def _loss_mark(experiment: Experiment, row: Row) -> str:
    """Return the mark of a node in which casts make values infinite or zero or clip them, such as "⚠ 64 inf". For folded modules,
    return how many of them have a mark, such as "⚠ in 3 of 8". Returns "" if there are no such values.
    """
    marks = [mark for node in row.nodes if (mark := experiment.results.losses.marks.get(node))]
    return f"⚠ in {len(marks)} of {len(row.members)}" if marks and row.members else "".join(marks)


def _name(experiment: Experiment, row: Row, width: int, state: RowState) -> tuple[str, str, str]:
    """Return (▾ for an open or ▸ for a closed node, name, text after the name). Together they fit into `width` cells.

    The text is a module's class, a tensor's shape, the number of folded modules, or the tensor to which a weight is tied.
    """
    width -= EDGE + 2 * row.depth + 3
    if row.tensor is None:
        twist = ("▾ " if state.opened else "▸ ") if row.can_open else "  "
        label = name_cell(row.label or experiment.model.title, width)
        failed = "failed here" if row.name and experiment.results.failed_module in row.nodes else ""
        kept = "keep f32" if row.module.keep_in_fp32 else ""
        totals = experiment.totals.of(row.modules)
        cache = experiment.served.caches.get(row.name, ())
        elsewhere = experiment.tree.tied_into(row.module.name) if totals.tied and not totals.nbytes else []
        tied = f"= {', '.join(tensor.name.removesuffix('.weight') for tensor in elsewhere)}" if elsewhere else ""
        draft = WORDS if not set(row.nodes).isdisjoint(experiment.tree.draft.modules) else ""
        about = " ".join(filter(None, (failed, tied, draft, kept, _cache_words(cache, row.module), _class_words(row))))
    else:
        twist = "  "
        label = name_cell(row.label, width)
        kept = "keep f32 " if row.tensor.name in experiment.tree.kept_in_fp32 else ""
        about = kept + (f"= {row.tensor.name}" if row.alias else row.about)
    width -= len(label) + 2
    whole = f"{about} {row.sizes}"
    about = whole if row.sizes and len(whole) <= width else about
    return twist, label, name_cell(about, width) if width >= min(len(about), 5) else ""


def _cache_words(cache: Sequence[KVCacheTensor], node: Module) -> str:
    """Return the size for one token of a node's only KV cache tensor, such as `[2 × 64]` for two heads, or ""."""
    if len(cache) != 1 or node.children:
        return ""
    tensor = cache[0]
    if tensor.shared_with is not None:
        return f"= {tensor.shared_with}"
    if tensor.fixed:
        return f"[{tensor.fixed:,}]"
    heads = f"{tensor.heads} × " if tensor.heads > 1 else ""
    window = f", window {tensor.window:,}" if tensor.window is not None else ""
    runs = f", {tensor.runs} runs" if tensor.runs > 1 else ""
    return f"[{heads}{tensor.per_token // tensor.heads}]{window}{runs}"


def _class_words(row: Row) -> str:
    """Return the class of a row's module or, for a list of modules of one class, their number and class, such as "32 × Block"."""
    classes = {child.class_name for child in row.module.children.values()}
    if not row.members and row.module.class_name == "ModuleList" and len(classes) == 1:
        return f"{len(row.module.children)} × {classes.pop()}"
    return row.about


def _add_dtype(line: _Line, experiment: Experiment, row: Row, end: int) -> None:
    """Add the dtype column: a module's dtypes, or a tensor's cast, such as `f32→bf16`. If the tensor has another dtype in the
    reference checkpoint, this dtype comes first. Earlier dtypes for which there is no room are left out. The layers with which a
    weight shares its scale come last.
    """
    if cache := experiment.served.caches.get(row.name):
        _add_mix(line, experiment.cache_totals(cache), end)
    elif row.tensor is None:
        _add_mix(line, experiment.totals.of(row.modules), end)
    else:
        planned = experiment.plan.dtypes[row.tensor.name]
        changes = ((row.tensor.reference_dtype, row.tensor.dtype), (row.tensor.dtype, planned))
        earlier = [f"{dtypes.short_name(old)}→" for old, new in changes if old not in (None, new)]
        while earlier and line.width + sum(map(len, earlier)) + len(pill(planned)[0]) > end:
            del earlier[0]
        for before in earlier:
            line.add(before, DIM)
        _add_pill(line, planned, end)
        if padded(row.tensor.shape, planned):
            line.add(truncate(" padded", end - line.width), DIM)
        if not row.tensor.persistent:
            line.add(truncate(" not saved", end - line.width), DIM)
        mark = experiment.results.losses.marks.get(row.tensor.name)
        if mark is not None:
            line.add(f" {mark}" if len(mark) < end - line.width else " ⚠", _LOST)
    weight = row.tensor if row.tensor is not None else row.module.tensors.get("weight")
    if weight is not None and not row.members and (shared := scale_shared_with(weight.name, experiment.plan.dtypes)):
        words = (f" scale with {shared}", f" with {shared}")
        line.add(next((word for word in words if len(word) <= end - line.width), ""), DIM)


def _add_mix(line: _Line, totals: Totals, end: int) -> None:
    """Add the badge of a module's only dtype, or a bar of all its dtypes and the name of the one with the most bytes."""
    shares = totals.mix()
    if len(shares) == 1:
        _add_pill(line, shares[0][0], end)
    elif shares:
        room, (first, share) = end - line.width, shares[0]
        name = f" {dtypes.short_name(first)}"
        if room >= 20:
            name += f" {percent(share)} %"
        width = 8 if room >= 20 else max(3, min(6, room - len(name)))
        line.add_pieces(stacked(shares, width))
        line.add(truncate(name, end - line.width), DIM)


def _add_pill(line: _Line, dtype: str, end: int) -> None:
    text, style = pill(dtype)
    room = end - line.width
    fitting = (each for each in (text, text.rstrip(), text.strip()) if len(each) <= room)
    line.add(next(fitting, "") or truncate(text, room), style)


def _add_size(line: _Line, experiment: Experiment, row: Row, columns: Columns) -> None:
    whole = 0
    if cache := experiment.served.caches.get(row.name):
        parameters, size = "", experiment.cache_totals(cache).total_bytes
    elif row.tensor is None:
        totals = experiment.totals.of(row.modules)
        parameters = totals.parameters_text if totals.parameters or totals.unknown else ""
        size = totals.total_bytes
        whole = experiment.totals[row.module.name.rpartition(".")[0]].total_bytes if row.name else size
    else:
        tensor = row.tensor
        known = human_count(tensor.parameters) if tensor.parameters else ""
        parameters = "unknown" if tensor.logical_numel == "unknown" else known
        size = tensor_bytes(tensor, experiment.plan.dtypes[tensor.name])
        whole = experiment.totals[row.module.name].total_bytes
    counted = not row.alias and not (experiment.model.partial and row.tensor is None)
    if columns.parameters:
        line.add(f"{parameters if counted else '':>{columns.parameters}}")
    counted = counted and size > 0
    if columns.size:
        line.add(f"{short_bytes(size) if counted else '':>{columns.size}}")
    if columns.share:
        line.fill(line.width + 1)
        (filled, style), _ = meter(min(1.0, size / whole) if counted and whole else 0.0, columns.share - 1, "dim")
        line.add(f"{filled:<{columns.share - 1}}", _style(style))


def _drift(experiment: Experiment, row: Row) -> ModuleDrift | None:
    """Return the drift that a row shows, or None if unknown. For a tensor, it is the difference from the reference checkpoint."""
    if row.tensor is not None:
        return experiment.results.weights.get(row.tensor.name)
    report = experiment.results.report
    return _drift_of_modules(row, report.output if report is not None else None, experiment.results.modules)


def _drift_of_modules(row: Row, output: OutputDrift | None, modules: Mapping[str, ModuleDrift]) -> ModuleDrift | None:
    """Return the drift of a row's module, the worst of its folded modules or of a list or, for the root, the model's output's."""
    if row.name or output is None:
        return worst_drift(modules, row.modules)
    from dtype_engine.results.drift import ModuleDrift  # imported late, for a faster first paint

    return ModuleDrift("", output.sqnr_db, output.max_abs or 0.0, output.nonfinite, output.nonfinite_reference)


def _add_drift(line: _Line, experiment: Experiment, row: Row, columns: Columns) -> None:
    """Add a module's SQNR, and a bar that is longer the more the module drifts. Both are dim for a list of modules, which has the
    SQNR of its worst child. The bar's range is `Results.sqnr_range`.
    """
    if not columns.drift:
        return
    drift = _drift(experiment, row)
    number = drift_text(drift)
    value = None if drift is None else drift.sqnr_db if drift.is_finite else math.nan
    if drift is None or value is None:
        line.add(f"{number:>{columns.drift}}" + " " * columns.track)
        return
    is_of_child = row.tensor is None and drift.name not in ("", *row.nodes)
    name = "dim" if is_of_child else sqnr_colour(value, experiment.results.sqnr_limits)
    line.add(f"{number:>{columns.drift}}" + " " * min(1, columns.track), _style(name))
    if columns.track and value == math.inf:
        line.fill(line.width + columns.track - 1)
    elif columns.track:
        share = drift_share(value, experiment.results.sqnr_range)
        line.add_pieces(meter(share, columns.track - 1, name))


def _add_comparison(line: _Line, experiment: Experiment, row: Row, columns: Columns) -> None:
    """Add a module's SQNR under the baseline recipe, and by how much it is higher (+) or lower (-) under the current one."""
    baseline = experiment.baseline
    other, change = "", ""
    if baseline is not None and row.tensor is None:
        from dtype_engine.results.drift import sqnr_gain

        before = _drift_of_modules(row, baseline.output, experiment.baseline_modules)
        now = _drift(experiment, row)
        gain = sqnr_gain(now, before) if now is not None and before is not None else None
        other, change = drift_text(before), "" if gain is None else signed(gain, 1)
    cells = ((other, columns.other), (change, columns.change))
    line.add("".join(f"{text if width else '':>{width}}" for text, width in cells), DIM)


def _add_score(line: _Line, experiment: Experiment, row: Row, columns: Columns) -> None:
    number, share = experiment.scan.cell(row.nodes)
    name = heat(share)
    line.add(f"{number:>{columns.scan}}" + " " * min(1, columns.heat), _style(name) if number else PLAIN)
    if columns.heat:
        line.add_pieces(meter(share, columns.heat - 1, name) if number else ((" " * (columns.heat - 1), ""),))
