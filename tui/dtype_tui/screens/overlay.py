"""Boxes of text over the main screen: a node's details, the help, and what was asked of the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Totals
from dtype_engine.core.units import decibels, human_bytes, human_count, seconds_text, share_text
from dtype_engine.reports.text import mix_text, parameters_text, parting
from dtype_engine.reports.text_losses import loss_words
from dtype_engine.results.drift import Generation, ImplicitCastStats, SpeedReport, WeightStats, Written
from dtype_tui.rendering.cells import bar, fit, wrap_dotted
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.state.experiment import Experiment

_NAME = 26
"""Cells that a module's name has beside what it did, as far as cutting the operation gives them."""


class Overlay(ModalScreen[None]):
    """A box of text over the main screen, scrolled by the usual keys."""

    DEFAULT_CSS = """
    Overlay { align: center middle; }
    Overlay > VerticalScroll { width: 96%; max-width: 100; height: auto; max-height: 90%; border: round $accent; padding: 0 1;
        background: $surface; scrollbar-size-vertical: 1; }
    Overlay Static { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark", "dismiss", "Close"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(self, title: str, body: Text | Table) -> None:
        super().__init__()
        self._title = title
        self._body = body

    @staticmethod
    def room(width: int) -> int:
        """Cells for text on a screen of this width."""
        return min(100, 96 * width // 100) - 5  # border, padding, and the bar that tells how far it is scrolled

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = Text(self._title)
            box.border_subtitle = "Esc closes"
            yield Static(self._body, markup=False)

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


def details(experiment: Experiment, node: str) -> Overlay:
    """All that is known of one module or tensor."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("name", printable(node, 2000) or "the whole model")
    module = experiment.tree.modules.get(node)
    if module is not None:
        stored = experiment.tree.totals()[node]
        planned = experiment.totals[node]
        grid.add_row("class", module.class_name or _no_class(experiment))
        exact = "" if planned.unknown else f"{planned.parameters:,} ("
        grid.add_row("parameters", f"{exact}{parameters_text(planned)}{')' if exact else ''}")
        if planned.buffers:
            grid.add_row("buffers", f"{planned.buffers:,} elements, not counted as parameters")
        if tied := experiment.tree.tied_into(node):
            names = ", ".join(printable(found.name, 500) for found in tied)
            grid.add_row("tied", f"{names}: counted there, not here")
        grid.add_row("stored", f"{_bytes_by_dtype(stored)}")
        grid.add_row("planned", f"{_bytes_by_dtype(planned)}")
        if module.island:
            grid.add_row("keep float32", module.island)
        reading = experiment.modules.get(node)
        if reading is not None:
            grid.add_row(
                "drift",
                f"SQNR {decibels(reading.sqnr_db)}, max |Δ| {reading.max_abs:.4e}, non-finite {reading.nonfinite:,}",
            )
    tensor = experiment.tensor(node) if module is None else None
    if tensor is not None:
        planned_dtype = experiment.plan.dtypes[tensor.name]
        if tensor.aliases:
            grid.add_row("tied", ", ".join(printable(name, 500) for name in tensor.names) + ": one tensor, one dtype")
        grid.add_row("kind", tensor.kind)
        grid.add_row("shape", " × ".join(map(str, tensor.shape)) or "scalar")
        grid.add_row("elements", f"{tensor.numel:,}")
        grid.add_row("stored", f"{tensor.dtype}, {human_bytes(tensor.nbytes)}")
        grid.add_row("planned", f"{planned_dtype}, {human_bytes(experiment.planned_bytes(tensor))}")
        row = dtypes.BY_NAME.get(planned_dtype)
        if row is not None and row.kind == "float":
            grid.add_row(
                "range", f"largest {row.max:.4g}, smallest normal {row.tiny:.4g}, {row.mantissa} mantissa bits"
            )
        if not tensor.castable:
            grid.add_row("never cast", tensor.fixed or f"{tensor.dtype} is not a dtype that one computes in")
        for loss in experiment.lost or ():
            if loss.tensor == tensor.name:
                before = f"; {loss.nonfinite:,} were not finite before" if loss.nonfinite else ""
                rounding = ", which is rounding" if loss.is_rounding else ""
                grid.add_row("values lost", f"{loss_words(loss)}{rounding}{before}")
    for place, rule, won, taken in experiment.explain(node):
        verdict = (
            "decides" if won == taken else "loses to a later rule" if won == 0 else f"decides {won} of {taken} tensors"
        )
        grid.add_row(f"rule {place + 1}", f"{printable(str(rule), 500)}  {verdict}")
    if not experiment.explain(node):
        grid.add_row("rules", "none: as stored")
    return Overlay(printable(node.rpartition(".")[2], 60) or experiment.title, grid)


def _bytes_by_dtype(totals: Totals) -> str:
    of = " of the bytes" if len(totals.mix()) > 1 else ""
    return f"{human_bytes(totals.total_bytes)}  {mix_text(totals)}{of}" if totals.mix() else human_bytes(0)


def _no_class(experiment: Experiment) -> str:
    if experiment.no_forward is None and not experiment.live:
        return "known when the model is loaded"
    return (
        "none: it only holds others"
        if experiment.tree.has_classes
        else "not known: nothing says which architecture this is"
    )


def help_screen(sections: Iterable[tuple[str, Iterable[tuple[str, str]]]], words: Iterable[tuple[str, str]]) -> Overlay:
    """Every key, from the bindings themselves, and what the panes' words mean."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for title, rows in sections:
        grid.add_row(Text(title, style="bold"), "")
        for keys, what in rows:
            grid.add_row(f"  {keys}", what)
        grid.add_row("", "")
    for title, text in words:
        grid.add_row(Text(title, style="bold"), text)
    return Overlay("Help", grid)


def flow_screen(casts: Sequence[ImplicitCastStats], width: int) -> Overlay:
    """The implicit casts of one forward pass, those to float64 first, on a screen of this width."""
    if not casts:
        return Overlay("Dtype flow", Text("No implicit casts: every operation was given one dtype."))
    repeated = any(cast.count > 1 for cast in casts)
    words = ("operation", "from → to", "elements", *(["times"] if repeated else []), "in torch")
    rows: list[list[Text]] = []
    for cast in casts:
        change = Text(f"{dtypes.badge(cast.source)} → ")
        change.append(dtypes.badge(cast.target), style="bold" if cast.target == "float64" else "")
        raises = Text("raises", style="bold") if cast.torch_raises else Text("promotes", style="dim")
        times = [Text(str(cast.count))] if repeated else []
        rows.append([Text(cast.operation), change, Text(human_count(cast.elements)), *times, raises])
    widths = [
        max(len(word), *(cell.cell_len for cell in column))
        for word, column in zip(words, zip(*rows, strict=True), strict=True)
    ]
    room = Overlay.room(width) - sum(widths) - 2 * len(widths)
    # One long operation must not take the room of all the names.
    longest = max(len(words[0]), widths[0] - max(0, _NAME - room))
    room += widths[0] - min(widths[0], longest)
    for row in rows:
        row[0] = Text(fit(row[0].plain, longest))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    for word in words:
        grid.add_column(no_wrap=True, justify="right" if word in ("elements", "times") else "left")
    grid.add_row("module", *words, style="dim")
    for cast, row in zip(casts, rows, strict=True):
        grid.add_row(wrap_dotted(printable(cast.module, 500) or "the model", room), *row)
    return Overlay("Dtype flow of one forward pass", grid)


def generation_screen(texts: Sequence[Generation]) -> Overlay:
    """What both wrote, side by side; the first token that differs stands between brackets."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(ratio=1, overflow="fold")
    for number, text in enumerate(texts):
        if number:
            grid.add_row("", "")
        grid.add_row(Text("reference", style="bold"), Text("candidate", style="bold"))
        grid.add_row(_written(text, text.reference), _written(text, text.candidate))
        grid.add_row(*(Text(_pace(written), style="dim") for written in (text.reference, text.candidate)))
        grid.add_row(Text(parting(text), style="bold" if text.differs else ""), "")
    return Overlay("Greedy text after the first prompt" if len(texts) == 1 else "Greedy text after each prompt", grid)


def _written(text: Generation, written: Written) -> Text:
    """The prompt's last line, dim, and what follows it, safe for a terminal, line by line."""
    shown = Text(_safe_lines("…" + text.prompt[-60:] if len(text.prompt) > 60 else text.prompt), style="dim")
    for place, piece in enumerate(written.pieces):
        if text.differs and place == text.same_tokens:
            shown.append(f"⟦{_safe_lines(piece)}⟧", style="bold reverse")
        else:
            shown.append(_safe_lines(piece), style="not dim")
    return shown


def _safe_lines(text: str) -> str:
    return "\n".join(printable(line, 2000) for line in text.split("\n"))


def _pace(written: Written) -> str:
    rate = len(written.ids) / written.seconds if written.seconds else 0.0
    return f"{len(written.ids)} tokens, {seconds_text(written.seconds)}, {rate:.0f}/s"


def speed_screen(report: SpeedReport) -> Overlay:
    """Times of forward passes, each against the reference's."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for _ in range(4):
        grid.add_column(no_wrap=True, justify="right")
    tokens = any(row.tokens_per_second for row in report.rows)
    grid.add_row("", "dtypes", "median", "fastest to slowest", "tokens/s" if tokens else "", "speed", style="dim")
    first = report.rows[0] if report.rows else None
    for row in report.rows:
        rate = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second is not None else ""
        ratio = f"{first.seconds / row.seconds:.2f} x" if first is not None and row.seconds else ""
        spread = f"{seconds_text(row.fastest)} to {seconds_text(row.slowest)}"
        grid.add_row(Text(row.what, style="bold"), row.dtypes, seconds_text(row.seconds), spread, rate, ratio)
    words = Text(f"\nafter a warm-up; {report.inputs}; {report.device}, {report.threads} threads", style="dim")
    if any(row.under_rules for row in report.rows):
        words.append("\nThis mix does not run in plain torch: its time holds what the rules for mixed dtypes take.")
    for notice in report.notices:
        words.append(f"\n{notice}")
    whole = Table.grid()
    whole.add_row(grid)
    whole.add_row(words)
    return Overlay("Forward passes over all inputs, timed", whole)


def weight_screen(experiment: Experiment, name: str, reading: WeightStats) -> Overlay:
    """The exponents of a tensor's values over the range of every dtype, and what a cast to each would do."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(6):
        table.add_column(no_wrap=True, justify="right")
    table.add_row("cast to", "SQNR", "max |Δ|", "→ inf", "clipped", "→ 0", "subnormal", style="dim")
    for error in reading.errors:
        counts = (error.overflowed, error.saturated, error.underflowed, error.subnormal)
        cells = [share_text(count, error.elements) for count in counts]
        table.add_row(
            Text(dtypes.badge(error.dtype), style="bold"),
            "-" if error.sqnr_db is None else decibels(error.sqnr_db),
            f"{error.max_abs:.2e}",
            *cells,
        )
    whole = Table.grid()
    whole.add_row(table)
    whole.add_row(Text(""))
    whole.add_row(_exponents(reading))
    tensor = experiment.tensor(name)
    stored = f", stored {dtypes.badge(tensor.dtype)}" if tensor else ""
    return Overlay(f"Values of {printable(name, 60)}{stored}", whole)


_RANGES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def _exponents(reading: WeightStats) -> Text:
    """A histogram, a line for each power of two, with marks where a dtype has normal values (|) or subnormal ones (:)."""
    counts = dict(reading.exponents.counts)
    text = Text()
    if not counts:
        return Text("no values but zeros" if reading.exponents.zeros else "no values")
    low, high = min(counts), max(counts)
    step = max(1, -(-(high - low + 1) // 24))
    text.append(f"{'|x| from':<10}{'values':>10}  {'':<24}", style="dim")
    text.append("  ".join(dtypes.badge(name) for name in _RANGES) + "\n", style="dim")
    grouped = [
        (first, sum(counts.get(power, 0) for power in range(first, first + step)))
        for first in range(low + (high - low) // step * step, low - 1, -step)
    ]
    tallest = max(count for _, count in grouped)
    for first, count in grouped:
        text.append(f"2^{first:<8}{human_count(count) if count else '-':>10}  ")
        text.append(bar(count / tallest, 24), style="cyan")
        for name in _RANGES:
            row = dtypes.BY_NAME[name]
            mark = _mark(first, step, row)
            text.append(f"  {mark:<{len(row.badge)}}", style="bold" if mark not in ("|", ":") else "dim")
        text.append("\n")
    text.append(
        "| in range  : subnormal, fewer bits  0 vanishes  ∞ overflows (fp8 and int8 are scaled first)", style="dim"
    )
    if reading.exponents.zeros or reading.exponents.nonfinite:
        text.append(f"\nzeros {reading.exponents.zeros:,}, not finite {reading.exponents.nonfinite:,}", style="dim")
    return text


def _mark(first: int, step: int, row: dtypes.DType) -> str:
    """How a dtype keeps values from 2^first up to 2^(first + step), unscaled: the worst of them."""
    if first + step - 1 > math.frexp(row.max)[1] - 1:
        return "∞"
    smallest = math.frexp(row.tiny)[1] - 1
    if first < smallest - row.mantissa - 1:
        return "0"
    return ":" if first < smallest else "|"
