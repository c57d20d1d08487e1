"""The module tree: one line per node, with its dtype, bytes and drift.

The tree uses Textual's line API rather than its `Tree`: only visible rows are drawn, a cursor move repaints two lines, and the rows
of children are created when their node opens. The tree is therefore as fast with 90,000 tensors as with 90.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Offset, Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from dtype_engine.core.tree import ancestors
from dtype_tui.config.key_names import with_ids
from dtype_tui.state.folds import Folds, Members, fold_members, fold_name
from dtype_tui.state.node_rules import cast_nodes
from dtype_tui.widgets.cursor import over_cursor
from dtype_tui.widgets.tree_columns import Columns, columns_for, needed_width
from dtype_tui.widgets.tree_drawing import DIM, PLAIN, RowState, heading, row_segments
from dtype_tui.widgets.tree_rows import (
    MOST_MATCHES,
    ORDERS,
    Row,
    filtered_rows,
    first_opened,
    matching,
    open_rows,
    ordered,
)

if TYPE_CHECKING:
    from dtype_engine.core.tree import Module
    from dtype_engine.recipe import Plan
    from dtype_engine.results.drift import DriftReport
    from dtype_tui.state.experiment import Experiment
    from dtype_tui.state.preview import Preview

MOST_OPENED = 20_000
"""Maximum number of modules that a single key press opens."""


class ModuleTree(ScrollView, can_focus=True):
    """The tree widget. Its keys move the cursor and open and close nodes; the main screen handles all other keys."""

    HELP = (
        "Every module and tensor: dtype (or a bar of the mix by bytes, and the name of the largest part), bytes under the recipe, "
        "with a bar of the share of the parent's bytes, and drift as SQNR in dB. The bar of the SQNR is full for the worst module "
        "and empty for the best. A list of modules has the SQNR of its worst child, dimmed. Numbers of parameters appear in a "
        "wide terminal. Four or more neighbors that are alike, such as layers, are folded into one row if they have the same "
        "structure and planned dtypes and SQNRs that differ by at most 6 dB. This row has the bytes of all of them and the SQNR of "
        "the worst. F switches between it and a row for each."
    )

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
            Binding("tab", "screen.next_pane", "To the panes, or to the next pane if only one is shown", show=False),
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
        """Posted when the cursor has moved. name: the node that is now under the cursor."""

        name: str

    def __init__(self, experiment: Experiment, id: str | None = None) -> None:
        super().__init__(id=id)
        self.experiment = experiment
        self.folds = True
        self.rows: list[Row] = []
        self.cursor = 0
        self.preview: Preview | None = None
        self.filter_text = ""
        self.matches: list[str] = []
        self.order = ORDERS[0]
        self.hidden: frozenset[str] = frozenset()
        self._match_set: frozenset[str] = frozenset()
        self._painted: dict[int, Strip] = {}
        self._needed = (0, 0)
        """The result of `needed_width` for the rows."""
        self._opened = first_opened(experiment.tree)
        self._unfolded: set[str] = set()
        """The names of modules that are alike, but have a row each, because the user has opened their fold."""
        self._report: DriftReport | None = None
        """The complete measurement whose SQNRs decide which modules are folded. Rows stay while another measurement runs."""
        self._folds: Folds
        self._folds_made_for: tuple[Plan, DriftReport | None] | None = None
        self.rebuild()

    # -- what is visible -----------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Rebuild the rows. The cursor stays on its node or, if the node has no row any more, goes to the closest row above it."""
        self._make_rows()
        self._repaint_changed()
        self._show_cursor()

    def _make_rows(self) -> None:
        name = self.current.name if self.rows else ""
        self._find_folds()
        if self.filter_text:
            shown = self.matches[:MOST_MATCHES]
            self.rows = filtered_rows(self.experiment.tree, self._groups, self._is_open, shown)
        else:
            self.rows = open_rows(self.experiment.tree, self._ordered_groups, self._is_open)
        self._needed = needed_width(self.rows, self.experiment.model.title)
        self.cursor = self._index_of(name)
        # Assigning it would repaint every line, also those that stay as they are.
        self.set_reactive(ScrollView.virtual_size, Size(0, len(self.rows) + 1))
        self.refresh(layout=True, repaint=False)

    @property
    def _is_remeasured(self) -> bool:
        """Whether there is a complete measurement that is newer than the one by which modules are folded."""
        report = self.experiment.results.report
        return report is not None and report is not self._report

    @property
    def _folds_are_old(self) -> bool:
        made_for = self._folds_made_for
        return made_for is None or made_for[0] is not self.experiment.plan or made_for[1] is not self._report

    def _find_folds(self) -> None:
        experiment = self.experiment
        if self._folds_are_old:
            drift = {} if self._report is None else {module.name: module for module in self._report.modules}
            self._folds = Folds(experiment.tree, experiment.plan.dtypes, drift, experiment.plan.caches)
            self._folds_made_for = experiment.plan, self._report

    def _groups(self, parent: Module) -> list[Members]:
        return self._folds.below(parent) if self.folds else [(child,) for child in parent.children.values()]

    def _ordered_groups(self, parent: Module) -> list[Members]:
        return ordered(self.experiment, self._groups(parent), self.order)

    def _is_open(self, row: Row) -> bool:
        """Return whether the rows below `row` are shown. With a filter, all modules are open; only folds can be closed."""
        if row.members:
            return row.module.name in self._unfolded
        return bool(self.filter_text) or row.name in self._opened

    def _index_of(self, name: str) -> int:
        """Return the index of the row with this name or, if there is none, of the closest row above it."""
        index_of = {row.name: index for index, row in enumerate(self.rows)}
        members = fold_members(self.experiment.tree, name) if name not in index_of else ()
        if members:
            name = members[0].name
        while name not in index_of and name:
            module = self.experiment.tree.modules.get(name)
            fold = self._fold_around(module) if module is not None else None
            if fold is not None and fold_name(fold) in index_of:
                return index_of[fold_name(fold)]
            name = name.rpartition(".")[0]
        return index_of.get(name, 0)

    def _fold_around(self, module: Module) -> Members | None:
        return self._folds.around(module) if self.folds else None

    def _unfold_above(self, name: str) -> None:
        if self.folds:
            for above in (name, *ancestors(name)):
                module = self.experiment.tree.modules.get(above)
                self._unfolded.update(member.name for member in (module and self._folds.around(module)) or ())

    def fold(self, folds: bool) -> None:
        """Choose whether neighbors that are alike share one row. Shared rows that the user opened are closed."""
        self.folds = folds
        self._unfolded.clear()
        self.rebuild()

    def sort_by(self, order: str) -> None:
        self.order = order
        self.rebuild()

    def hide(self, columns: frozenset[str]) -> None:
        """Hide these columns, which are among `COLUMNS`, and show all others."""
        self.hidden = columns
        self._repaint_changed()

    def set_filter(self, text: str) -> None:
        """Show only nodes whose name contains `text` or matches it as a glob. An empty text shows all nodes."""
        self.filter_text = text.strip()
        self.matches = matching(self.experiment.tree, self.filter_text)
        self._match_set = frozenset(self.matches)
        self.rebuild()

    def next_match(self, step: int) -> bool:
        """Go to the next (step > 0) or previous (step < 0) node that matches the filter. Returns False if there is none."""
        indices = [index for index, row in enumerate(self.rows) if self._matches(row)]
        if not indices:
            return False
        after = [index for index in indices if (index > self.cursor if step > 0 else index < self.cursor)] or indices
        self.move_to(after[0] if step > 0 else after[-1])
        while self.current.matches:  # a closed fold: open it, and go to the match inside
            at, below = self.cursor, len(self.rows) - self.cursor
            self._set_open(self.current, True)
            inside = range(at + 1, len(self.rows) - below + 1)
            found = [index for index in inside if self._matches(self.rows[index])]
            self.move_to(found[0] if step > 0 else found[-1])
        return True

    def _matches(self, row: Row) -> bool:
        return row.name in self._match_set or row.matches > 0

    def show_preview(self, preview: Preview | None) -> None:
        """Highlight the nodes that a rule would match, or none if `preview` is None or was made for an earlier tree."""
        is_current = preview is not None and len(preview.counts) == len(self.experiment.tree.order) + 1
        self.preview = preview if is_current else None
        self._repaint_changed()

    def new_tree(self) -> None:
        """Show the experiment's new tree, which is of the same model. Open nodes stay open."""
        self.preview = None
        self._folds_made_for = None
        self._opened = {name for name in self._opened if name in self.experiment.tree.modules} | {""}
        if len(self._opened) < 2:
            self._opened = first_opened(self.experiment.tree)
        self.set_filter(self.filter_text)

    # -- the cursor ----------------------------------------------------------------------------------------------

    @property
    def current(self) -> Row:
        return self.rows[self.cursor]

    def move_to(self, index: int) -> None:
        """Put the cursor on the row with this index. Repaint only the cursor's old line and its new line."""
        index = max(0, min(index, len(self.rows) - 1))
        if index == self.cursor:
            return
        before, self.cursor = self.cursor, index
        self._paint(before)
        self._paint(index)
        self._show_cursor()
        if self.rows[before].members and self._is_remeasured:
            self.refresh_changed()  # a measurement may have been waiting to split this fold
        self.post_message(self.Moved(self.current.name))

    def go_to_row(self, row: Row) -> None:
        """Put the cursor on the row of the same node as `row`, if the node still has one."""
        self.move_to(next((index for index, each in enumerate(self.rows) if each.name == row.name), self.cursor))

    def go_to(self, name: str) -> bool:
        """Open all rows above a node, clear the filter, and put the cursor on the node. Returns False if there is no such node."""
        tree, members = self.experiment.tree, fold_members(self.experiment.tree, name)
        if not members and name not in tree.modules and tree.canonical(name) is None:
            return False
        node = members[0].name if members else name
        self._opened.update(ancestors(node))
        self._unfold_above(node.rpartition(".")[0] if members else node)
        self.filter_text, self.matches, self._match_set = "", [], frozenset()
        self.rebuild()
        self.move_to(self._index_of(name))
        return True

    def rows_on_screen(self) -> Iterator[tuple[Row, Offset]]:
        """Yield each visible row, with the position at which it begins, in cells from the upper left corner of the screen."""
        top = self.scroll_offset.y
        for line, row in enumerate(self.rows[top : top + self.size.height - 1], 1):
            yield row, self.region.offset + Offset(0, line)

    def _paint(self, index: int) -> None:
        line = index - self.scroll_offset.y + 1
        if 0 < line < self.size.height:
            self._refresh_line(line)

    def _show_cursor(self) -> None:
        top, lines = self.scroll_offset.y, max(1, self.size.height - 1)
        nearest = max(self.cursor - lines + 1, min(top, self.cursor))
        if nearest != top:
            self.scroll_to(y=nearest, animate=False, immediate=True)

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
        if row.can_open and self._is_open(row):
            self.move_to(self.cursor + 1)
        elif row.can_open:
            self._set_open(row, True)

    def action_close(self) -> None:
        if self.current.name and self._can_close(self.current):
            self._set_open(self.current, False)
        else:
            self.action_parent()

    def action_open_or_close(self) -> None:
        if self._can_close(self.current):
            self._set_open(self.current, False)
        else:
            self.action_open()

    def _can_close(self, row: Row) -> bool:
        return row.tensor is None and self._is_open(row) and bool(row.members or not self.filter_text)

    def _set_open(self, row: Row, opens: bool) -> None:
        names, opened = (row.nodes, self._unfolded) if row.members else ((row.name,), self._opened)
        (opened.update if opens else opened.difference_update)(names)
        self.rebuild()

    def action_sibling(self, step: int) -> None:
        depth = self.current.depth
        index = self.cursor + step
        while 0 <= index < len(self.rows) and self.rows[index].depth > depth:
            index += step
        if 0 <= index < len(self.rows) and self.rows[index].depth == depth:
            self.move_to(index)

    def action_parent(self) -> None:
        depth = self.current.depth
        self.move_to(next((p for p in reversed(range(self.cursor)) if self.rows[p].depth < depth), 0))

    def action_next_cast(self, step: int) -> None:
        """Go to the next (step > 0) or previous node whose castable tensors are all cast. After the last node, go to the first."""
        nodes = cast_nodes(self.experiment.tree, self.experiment.plan)
        if not nodes:
            self.app.notify("no node is cast as a whole", markup=False)
            return
        order = {name: i for i, name in enumerate(self.experiment.tree.names[0])}
        row = self.current
        # From a closed fold whose members are cast, go on after its last member, since the members have no rows.
        passes = step > 0 and bool(row.members) and not self._is_open(row) and row.nodes[-1] in nodes
        here = order.get(row.nodes[-1 if passes else 0], -1)
        indices = [order.get(node, -1) for node in nodes]
        if step > 0:
            at = next((i for i, index in enumerate(indices) if index > here), 0)
        else:
            at = next((i for i in reversed(range(len(indices))) if indices[i] < here), -1)
        module = self.experiment.tree.modules.get(nodes[at])
        fold = self._fold_around(module) if module is not None else None
        is_closed = fold is not None and fold[0].name not in self._unfolded
        self.go_to(fold_name(fold) if fold is not None and is_closed else nodes[at])

    def action_expand_all(self) -> None:
        below: list[str] = []
        stack = list(self.current.modules)
        while stack and len(below) <= MOST_OPENED:
            node = stack.pop()
            below.append(node.name)
            stack.extend(node.children.values())
        if stack:
            self.app.notify(f"more than {MOST_OPENED:,} nodes below: go to a node with fewer", markup=False)
            return
        self._opened.update(below)
        self._unfolded.update(below if self.current.members else below[1:])
        self.rebuild()

    def action_collapse_all(self) -> None:
        row = self.current
        names = {module.name for module in row.modules}
        inside = tuple(f"{name}." if name else "" for name in names)
        self._opened = {name for name in self._opened if name not in names and not name.startswith(inside)} | {""}
        self._unfolded = {name for name in self._unfolded if not name.startswith(inside)}
        if row.members:
            self._unfolded -= names
        self.rebuild()

    def on_click(self, event: events.Click) -> None:
        index = event.y - 1 + self.scroll_offset.y
        if event.y > 0 and index < len(self.rows):
            if index == self.cursor:
                self.action_open_or_close()
            self.move_to(index)

    def on_resize(self) -> None:
        self._show_cursor()

    # -- drawing -------------------------------------------------------------------------------------------------

    def refresh_changed(self) -> None:
        """Redraw what has changed. After a change of the plan or a complete measurement, first fold the modules again."""
        # A measurement must not split the fold under the cursor. The next key would act on fewer modules than chosen.
        if self._is_remeasured and not (self.rows and self.current.members):
            self._report = self.experiment.results.report
        if self.folds and self._folds_are_old:
            before = self.cursor
            self._find_folds()
            if not self.current.members:
                self._unfold_above(self.current.name)
            self._make_rows()
            if self.cursor != before:  # scroll, so that the cursor's line does not move
                self.scroll_to(y=self.scroll_offset.y + self.cursor - before, animate=False, immediate=True)
        self._repaint_changed()

    def _repaint_changed(self) -> None:
        for y in range(self.size.height):
            self._refresh_line(y)

    def _refresh_line(self, y: int) -> None:
        if y in self._painted and self._painted[y] != self.line(y):
            self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        self._painted[y] = self.line(y)
        return self._painted[y]

    @property
    def _columns(self) -> Columns:
        room = self.size.width - self.scrollbar_size_vertical
        scanned, compares = self.experiment.scan.report is not None, self.experiment.baseline is not None
        return columns_for(room, self._needed, self.hidden, scanned, compares)

    def line(self, y: int) -> Strip:
        width, columns, base = self.size.width, self._columns, self._base
        if y == 0:
            line = heading(columns, self.experiment.scan.heading, self.experiment.baseline_mark)
            return line.adjust_cell_length(width, DIM).apply_style(base)
        index = y - 1 + self.scroll_offset.y
        if index >= len(self.rows):
            return _strip_of((), width, base)
        row = self.rows[index]
        opened, inside = self._is_open(row), 0
        if self.preview is not None and not opened and row.tensor is None:
            inside = sum(map(self.preview.count_below, row.modules))
        state = RowState(index == self.cursor, self._lit(row), self._matches(row), opened, inside)
        segments = row_segments(self.experiment, row, columns, state)
        if index == self.cursor:
            adjusted = Segment.adjust_line_length(segments, width, PLAIN)
            return over_cursor(self, adjusted).simplify().apply_style(base)
        return _strip_of(tuple(segments), width, base)

    @cached_property
    def _base(self) -> Style:
        """The theme's colors for text and background, or none if the theme uses the terminal's own."""
        if self.app.native_ansi_color:
            return PLAIN
        colours = self.rich_style
        return Style(color=colours.color, bgcolor=colours.bgcolor)

    def notify_style_update(self) -> None:
        """Use the colors of a new theme. Textual calls this when styles have changed."""
        self.__dict__.pop("_base", None)
        super().notify_style_update()

    def _lit(self, row: Row) -> bool:
        if self.preview is None:
            return False
        if row.tensor is not None:
            return row.tensor.name in self.preview.tensors
        lit = self.preview.modules
        return lit.issuperset(row.nodes) or any(name in lit for name in ancestors(row.nodes[0]))


@lru_cache(maxsize=256)
def _strip_of(segments: tuple[Segment, ...], width: int, base: Style) -> Strip:
    """Return a line of the tree. Results are cached, because most lines are the same when the screen is drawn again."""
    return Strip(Segment.adjust_line_length(list(segments), width, PLAIN)).simplify().apply_style(base)
