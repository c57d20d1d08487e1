"""The module tree: dtype, parameters, bytes and drift of every node, one line each.

A list of visible rows on Textual's line API rather than its `Tree`: only the rows in sight are ever drawn, a cursor
move repaints two lines, and children are made when a node opens, so 90 000 tensors are no different from 90.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dtype_engine import dtypes
from dtype_engine.report_text import human_count
from dtype_engine.tree import Module, TensorInfo, ancestors

from ..cells import colour, drift_cell, mix_cell, name_cell, short_bytes
from ..keys import with_ids

if TYPE_CHECKING:
    from dtype_engine.readings import ModuleDrift

    from ..experiment import Experiment, Preview

ORDERS = ("model", "bytes", "drift")
"""Of a node's children: as the model has them, the largest first, those that drift most first."""
COLUMNS = ("params", "bytes", "drift")
"""Columns that can be left out; the name and the dtype are always there."""
MOST_OPENED = 20_000
MOST_MATCHES = 1000
"""Matches of a filter that are shown: nobody walks through more, and they come after every key."""


@dataclass(frozen=True, slots=True)
class Row:
    """A visible line: a module, or one tensor of it (`tensor` set; `alias` when it is tied to a tensor elsewhere)."""

    name: str
    depth: int
    module: Module
    tensor: TensorInfo | None = None

    @property
    def label(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def alias(self) -> bool:
        return self.tensor is not None and self.tensor.name != self.name


@dataclass(frozen=True, slots=True)
class Columns:
    """Widths in cells; 0 leaves a column out."""

    name: int
    dtype: int
    parameters: int
    size: int
    drift: int
    scan: int = 0


def columns_for(width: int, hidden: frozenset[str] = frozenset(), scanned: bool = False) -> Columns:
    """What fits: the mix of dtypes is shortened first, then the parameters and the drift go. With a scan its column
    comes, at the cost of the same. Those in `hidden` never come.
    """
    scan = 13 if scanned and width >= 50 else 0
    dtype = 24 if width - scan >= 76 else 13
    parameters = 8 if width - 2 * scan >= 60 and "params" not in hidden else 0
    size = 10 if "bytes" not in hidden else 0
    drift = 12 if width - scan >= 50 and "drift" not in hidden else 0
    room = width - dtype - parameters - size - drift - scan - 1
    return Columns(max(10, room), dtype, parameters, size, drift, scan)


class ModuleTree(ScrollView, can_focus=True):
    """The tree. Its keys move the cursor and open and close nodes; all else is the app's."""

    HELP = "Every module and tensor: dtype (or the mix by bytes), parameters, bytes under the recipe, drift as SQNR."

    DEFAULT_CSS = """
    ModuleTree { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    """

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        [
            Binding("up,k", "move(-1)", "Up", show=False),
            Binding("down,j", "move(1)", "Down", show=False),
            Binding("right,l", "open", "Open, or go to the first child", show=False),
            Binding("left,h", "close", "Close, or go to the parent", show=False),
            Binding("space", "open_or_close", "Open or close", show=False),
            Binding("tab", "app.next_pane", "Next pane, where they take turns", show=False),
            Binding("pageup,ctrl+b", "page(-1)", "Page up", show=False),
            Binding("pagedown,ctrl+f", "page(1)", "Page down", show=False),
            Binding("home,less_than_sign", "end(-1)", "First line", show=False),
            Binding("end,G,greater_than_sign", "end(1)", "Last line", show=False),
            Binding("right_square_bracket", "sibling(1)", "Next sibling", show=False),
            Binding("left_square_bracket", "sibling(-1)", "Previous sibling", show=False),
            Binding("P,backspace", "parent", "Parent", show=False),
            Binding("right_curly_bracket", "next_cast(1)", "Next node that is cast", show=False),
            Binding("left_curly_bracket", "next_cast(-1)", "Previous node that is cast", show=False),
            Binding("E", "expand_all", "Open everything below", show=False),
            Binding("W", "collapse_all", "Close everything below", show=False),
        ]
    )

    @dataclass
    class Moved(Message):
        """The cursor is on another node."""

        name: str

    def __init__(self, experiment: Experiment, id: str | None = None) -> None:
        super().__init__(id=id)
        self.experiment = experiment
        self.rows: list[Row] = []
        self.cursor = 0
        self.preview: Preview | None = None
        self.filter_text = ""
        self.matches: list[str] = []
        self.order = ORDERS[0]
        self.hidden: frozenset[str] = frozenset()
        self._match_set: frozenset[str] = frozenset()
        self._painted: dict[int, Strip] = {}
        self._opened: set[str] = {""}
        self._open_first_levels()
        self.rebuild()

    # -- what is visible -----------------------------------------------------------------------------------------

    def _open_first_levels(self) -> None:
        """Open from the root down while there is only one way to go, and one level more."""
        node = self.experiment.tree.root
        while len(node.children) == 1 and not node.tensors:
            node = next(iter(node.children.values()))
            self._opened.add(node.name)
        if len(node.children) <= 12:
            self._opened |= {child.name for child in node.children.values() if 0 < len(child.children) <= 64}

    def rebuild(self) -> None:
        """Make the rows anew, the cursor staying on its node, or on the nearest one above that is still there."""
        name = self.rows[self.cursor].name if self.rows else ""
        self.rows = self._filtered_rows() if self.filter_text else self._open_rows()
        places = {row.name: place for place, row in enumerate(self.rows)}
        while name not in places and name:
            name = name.rpartition(".")[0]
        self.cursor = places.get(name, 0)
        self.virtual_size = Size(0, len(self.rows) + 1)
        self.refresh()
        self._show_cursor()

    def _open_rows(self) -> list[Row]:
        rows: list[Row] = []
        stack: list[tuple[Module, int]] = [(self.experiment.tree.root, 0)]
        while stack:
            node, depth = stack.pop()
            rows.append(Row(node.name, depth, node))
            if node.name in self._opened:
                rows.extend(_tensor_rows(node, depth + 1))
                stack.extend((child, depth + 1) for child in reversed(self._ordered(node)))
        return rows

    def _ordered(self, node: Module) -> list[Module]:
        children = list(node.children.values())
        if self.order == "bytes":
            children.sort(key=lambda child: -self.experiment.totals[child.name].total_bytes)
        elif self.order == "drift":
            children.sort(key=lambda child: _drift_key(self.experiment.modules.get(child.name)))
        return children

    def sort_by(self, order: str) -> None:
        """Children in one of `ORDERS`; the cursor stays on its node."""
        self.order = order
        self.rebuild()

    def hide(self, columns: frozenset[str]) -> None:
        """Leave out these of `COLUMNS`."""
        self.hidden = columns
        self.refresh()

    def _filtered_rows(self) -> list[Row]:
        """The first nodes that match, and those above them."""
        shown: set[str] = {""}
        for name in self.matches[:MOST_MATCHES]:
            while name not in shown:
                shown.add(name)
                name = name.rpartition(".")[0]
        rows: list[Row] = []
        stack: list[tuple[Module, int]] = [(self.experiment.tree.root, 0)]
        while stack:
            node, depth = stack.pop()
            rows.append(Row(node.name, depth, node))
            rows.extend(row for row in _tensor_rows(node, depth + 1) if row.name in shown)
            stack.extend((child, depth + 1) for child in reversed(node.children.values()) if child.name in shown)
        return rows

    def set_filter(self, text: str) -> None:
        """Show only nodes whose name has `text` in it, or matches it as a glob; empty shows all."""
        self.filter_text = text.strip()
        if not self.filter_text:
            self.matches = []
        else:
            wanted = self.filter_text.lower()
            names, lowered = self.experiment.tree.names
            if any(character in wanted for character in "*?["):
                found = re.compile(translate(wanted)).match
                self.matches = [name for name, low in zip(names, lowered, strict=True) if found(low)]
            else:
                self.matches = [name for name, low in zip(names, lowered, strict=True) if wanted in low]
        self._match_set = frozenset(self.matches)
        self.rebuild()

    def next_match(self, step: int) -> bool:
        """Go to the next or previous match; False when there is none."""
        places = [place for place, row in enumerate(self.rows) if row.name in self._match_set]
        if not places:
            return False
        after = [place for place in places if (place > self.cursor if step > 0 else place < self.cursor)]
        self.move_to((after[0] if step > 0 else after[-1]) if after else (places[0] if step > 0 else places[-1]))
        return True

    def show_preview(self, preview: Preview | None) -> None:
        """Light up what a rule would take."""
        self.preview = preview
        self.refresh()

    def new_tree(self) -> None:
        """The experiment has another tree: of the same model, so what was open stays open."""
        opened = self._opened
        self._opened = {name for name in opened if name in self.experiment.tree.modules} | {""}
        if len(self._opened) < 2:
            self._open_first_levels()
        self.set_filter(self.filter_text)

    # -- the cursor ----------------------------------------------------------------------------------------------

    @property
    def current(self) -> Row:
        """The row under the cursor."""
        return self.rows[self.cursor]

    def move_to(self, place: int) -> None:
        """Put the cursor on a row; only the two lines that change are painted again."""
        place = max(0, min(place, len(self.rows) - 1))
        if place == self.cursor:
            return
        before, self.cursor = self.cursor, place
        self._paint(before)
        self._paint(place)
        self._show_cursor()
        self.post_message(self.Moved(self.current.name))

    def go_to(self, name: str) -> bool:
        """Put the cursor on a node by name, opening what is above it. False when there is no such node."""
        if name not in self.experiment.tree.modules and self.experiment.tree.canonical(name) is None:
            return False
        above = name.rpartition(".")[0]
        while above:
            self._opened.add(above)
            above = above.rpartition(".")[0]
        self.filter_text, self.matches, self._match_set = "", [], frozenset()
        self.rebuild()
        self.move_to(next((place for place, row in enumerate(self.rows) if row.name == name), self.cursor))
        return True

    def _paint(self, place: int) -> None:
        line = place - self.scroll_offset.y + 1
        if 0 < line < self.size.height:
            self.refresh(Region(0, line, self.size.width, 1))

    def _show_cursor(self) -> None:
        lines = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, immediate=True)
        elif self.cursor >= top + lines:
            self.scroll_to(y=self.cursor - lines + 1, animate=False, immediate=True)

    def action_move(self, step: int) -> None:
        self.move_to(self.cursor + step)

    def action_page(self, direction: int) -> None:
        lines = max(1, self.size.height - 2)
        top = max(0, min(self.scroll_offset.y + direction * lines, len(self.rows) - lines - 1))
        self.scroll_to(y=top, animate=False, immediate=True)
        self.move_to(self.cursor + direction * lines)

    def action_end(self, direction: int) -> None:
        self.move_to(0 if direction < 0 else len(self.rows) - 1)

    def action_open(self) -> None:
        row = self.current
        if row.tensor is not None or not (row.module.children or row.module.tensors):
            return
        if row.name in self._opened or self.filter_text:
            self.move_to(self.cursor + 1)
        else:
            self._opened.add(row.name)
            self.rebuild()

    def action_close(self) -> None:
        row = self.current
        if row.tensor is None and row.name in self._opened and row.name and not self.filter_text:
            self._opened.discard(row.name)
            self.rebuild()
        else:
            self.move_to(next((p for p in reversed(range(self.cursor)) if self.rows[p].depth < row.depth), 0))

    def action_open_or_close(self) -> None:
        row = self.current
        if row.tensor is None and row.name in self._opened:
            self._opened.discard(row.name)
            self.rebuild()
        else:
            self.action_open()

    def action_sibling(self, step: int) -> None:
        depth = self.current.depth
        place = self.cursor + step
        while 0 <= place < len(self.rows) and self.rows[place].depth > depth:
            place += step
        if 0 <= place < len(self.rows) and self.rows[place].depth == depth:
            self.move_to(place)

    def action_parent(self) -> None:
        depth = self.current.depth
        self.move_to(next((p for p in reversed(range(self.cursor)) if self.rows[p].depth < depth), 0))

    def action_next_cast(self, step: int) -> None:
        """Through the topmost nodes that are cast as a whole, in the model's order, round and round."""
        nodes = self.experiment.cast_nodes()
        if nodes:
            order = {name: place for place, name in enumerate(self.experiment.tree.names[0])}
            here = order.get(self.current.name, -1)
            places = [order.get(node, -1) for node in nodes]
            if step > 0:
                found = next((i for i, place in enumerate(places) if place > here), 0)
            else:
                found = next((i for i in reversed(range(len(places))) if places[i] < here), -1)
            self.go_to(nodes[found])

    def action_expand_all(self) -> None:
        below: list[str] = []
        stack = [self.current.module]
        while stack and len(below) <= MOST_OPENED:
            node = stack.pop()
            below.append(node.name)
            stack.extend(node.children.values())
        if stack:
            self.app.notify(f"more than {MOST_OPENED:,} nodes below: go to a smaller one", markup=False)
            return
        self._opened.update(below)
        self.rebuild()

    def action_collapse_all(self) -> None:
        inside = f"{self.current.module.name}." if self.current.module.name else ""
        self._opened = {name for name in self._opened if name != inside[:-1] and not name.startswith(inside)} | {""}
        if not inside:
            self._opened = {""}
        self.rebuild()

    def on_click(self, event: events.Click) -> None:
        place = event.y - 1 + self.scroll_offset.y
        if event.y > 0 and place < len(self.rows):
            if place == self.cursor:
                self.action_open_or_close()
            self.move_to(place)

    def on_resize(self) -> None:
        self._show_cursor()

    # -- drawing -------------------------------------------------------------------------------------------------

    def refresh_changed(self) -> None:
        """Paint again only the lines in sight that no longer look as they did: a reading is a few cells, not a screen."""
        for y in range(self.size.height):
            painted = self._painted.get(y)
            if painted is not None and self._line(y) != painted:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        self._painted[y] = self._line(y)
        return self._painted[y]

    def _line(self, y: int) -> Strip:
        width = self.size.width
        scan = self.experiment.scan
        columns = columns_for(width, self.hidden, scan.report is not None)
        if y == 0:
            return _heading(columns, scan.heading).adjust_cell_length(width, _DIM)
        place = y - 1 + self.scroll_offset.y
        if place >= len(self.rows):
            return Strip.blank(width, _PLAIN)
        row = self.rows[place]
        segments = self._row_segments(row, columns)
        strip = Strip(segments).adjust_cell_length(width, _PLAIN)
        if place == self.cursor:
            return strip.apply_style(_CURSOR if self.has_focus else _CURSOR_AWAY)
        return strip

    def _row_segments(self, row: Row, columns: Columns) -> list[Segment]:
        experiment = self.experiment
        lit = self._lit(row)
        marker = "•" if lit else "❯" if self.rows[self.cursor] is row else " "
        indent = "  " * row.depth
        room = columns.name - len(indent) - 4
        if row.tensor is None:
            expandable = bool(row.module.children or row.module.tensors)
            opened = row.name in self._opened or bool(self.filter_text)
            twist = ("▾ " if opened else "▸ ") if expandable else "  "
            label = name_cell(row.label or experiment.title, room)
            failed = "failed here" if row.name and row.name == experiment.failed_module else ""
            island = "keep f32" if row.module.island else ""
            beside = " ".join(word for word in (failed, island, row.module.class_name) if word)
        else:
            twist = "  "
            label = name_cell(row.label, room)
            shape = " × ".join(map(str, row.tensor.shape)) or "scalar"
            beside = f"= {row.tensor.name}" if row.alias else f"[{shape}]"
        room_beside = room - len(label) - 2
        beside = name_cell(beside, room_beside) if room_beside >= min(len(beside), 5) else ""
        style = _LIT if lit else _MATCH if row.name in self._match_set else _BOLD if row.depth == 0 else _PLAIN
        segments = [Segment(f"{marker}{indent}{twist}", _DIM if not lit else _LIT), Segment(label, style)]
        used = 1 + len(indent) + 2 + len(label)
        if beside:
            segments.append(Segment(f"  {beside}", _DIM))
            used += 2 + len(beside)
        segments.append(Segment(" " * max(0, columns.name - used), _PLAIN))
        segments += _dtype_segments(experiment, row, columns.dtype)
        if row.tensor is None:
            totals = experiment.totals[row.name]
            elements, size = totals.total_elements, totals.total_bytes
        else:
            elements, size = row.tensor.numel, experiment.planned_bytes(row.tensor)
        counted = elements > 0 and not row.alias and not (experiment.partial and row.tensor is None)
        if columns.parameters:
            segments.append(Segment(f"{human_count(elements) if counted else '':>{columns.parameters}}", _PLAIN))
        if columns.size:
            segments.append(Segment(f"{short_bytes(size) if counted else '':>{columns.size}}", _PLAIN))
        if columns.drift:
            segments.append(_drift_segment(experiment, row, columns.drift))
        if columns.scan:
            segments.append(_scan_segment(experiment, row, columns.scan))
        return segments

    def _lit(self, row: Row) -> bool:
        if self.preview is None:
            return False
        if row.tensor is not None:
            return row.tensor.name in self.preview.tensors
        return row.name in self.preview.modules or any(name in self.preview.modules for name in ancestors(row.name))


_PLAIN = Style()  # never None: without colours Textual asks every segment for its style
_DIM = Style(dim=True)
_BOLD = Style(bold=True)
_LIT = Style(bold=True, color="yellow")
_MATCH = Style(underline=True)
_CURSOR = Style(reverse=True)
_CURSOR_AWAY = Style(underline=True)


def _heading(columns: Columns, scan: str = "") -> Strip:
    text = f"{' module':<{columns.name}}{'dtype':<{columns.dtype}}"
    if columns.parameters:
        text += f"{'params':>{columns.parameters}}"
    if columns.size:
        text += f"{'bytes':>{columns.size}}"
    if columns.drift:
        text += f"{'SQNR dB':>{columns.drift - 4}}    "
    if columns.scan:
        text += f"{scan:>{columns.scan - 4}}"
    return Strip([Segment(text, _DIM)])


def _drift_key(reading: ModuleDrift | None) -> tuple[float, float]:
    """Sorts the worst first; what was not measured comes last."""
    if reading is None or reading.sqnr_db is None:
        return (0.0, math.inf)
    return (-float(reading.nonfinite), reading.sqnr_db)


def _tensor_rows(node: Module, depth: int) -> list[Row]:
    prefix = f"{node.name}." if node.name else ""
    return [Row(prefix + local, depth, node, tensor) for local, tensor in node.tensors.items()]


def _dtype_segments(experiment: Experiment, row: Row, width: int) -> list[Segment]:
    """The dtype column: a node's mix, or `f32→bf16` of a tensor that a rule changed."""
    pieces: list[tuple[str, str]]
    if row.tensor is None:
        pieces = mix_cell(experiment.totals[row.name], width - 1)
    else:
        planned = experiment.plan.dtypes[row.tensor.name]
        if planned == row.tensor.dtype:
            pieces = [(dtypes.badge(planned), planned)]
        else:
            pieces = [(f"{dtypes.badge(row.tensor.dtype)}→", ""), (dtypes.badge(planned), planned)]
        if not row.tensor.persistent:
            pieces.append((" not saved", ""))
    segments: list[Segment] = []
    used = 0
    for text, dtype in pieces:
        text = text[: max(0, width - 1 - used)]
        used += len(text)
        segments.append(Segment(text, Style(color=colour(dtype), bold=dtype not in ("", "float32")) if dtype else _DIM))
    segments.append(Segment(" " * max(0, width - used), _PLAIN))
    return segments


def _drift_segment(experiment: Experiment, row: Row, width: int) -> Segment:
    reading = experiment.modules.get(row.name) if row.tensor is None else None
    if not row.name and experiment.report is not None:
        from dtype_engine.readings import ModuleDrift  # there is nothing to show of it at the first paint

        output = experiment.report.output
        reading = ModuleDrift("", output.sqnr_db, output.max_abs, output.nonfinite)
    number, drawn = drift_cell(reading)
    text = f"{number:>{width - 4}} {drawn}" if drawn else f"{number:>{width - 4}}"
    bad = reading is not None and (reading.nonfinite > 0 or (reading.sqnr_db is not None and reading.sqnr_db < 20))
    return Segment(f"{text:<{width}}", Style(bold=True, color="red") if bad else _PLAIN)


def _scan_segment(experiment: Experiment, row: Row, width: int) -> Segment:
    """The node's sensitivity in the dtype that the scan shows: figure and heat."""
    number, drawn, heat = experiment.scan.cell(row.name)
    colour_name = "red" if heat > 0.75 else "yellow" if heat > 0.5 else "default"
    return Segment(f"{number:>{width - 4}} {drawn:<3}"[:width].ljust(width), Style(color=colour_name))
