"""The Recipe pane: the rules in order, which can be changed there, and which of them decide the dtypes of a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.recipe import Plan, Rule, tensor_bytes
from dtype_tui.config.bindings import DIGITS
from dtype_tui.rendering.cells import short_bytes, truncate
from dtype_tui.rendering.palette import pill
from dtype_tui.state.controller import Controller
from dtype_tui.state.loading import loading_lines
from dtype_tui.state.node_rules import counts_by_rule, effects_on
from dtype_tui.widgets.cursor import EDGE, EDGE_STYLE, cursor_style
from dtype_tui.widgets.loading import find_loadings, takes_a_thread
from dtype_tui.widgets.panes.base import Pane

if TYPE_CHECKING:
    from dtype_engine.recipe.loading import Loading
    from dtype_tui.state.rule_list import ListedRule

_GAPS = 8
"""Number of blank cells in a rule's line, and of the `·` in it."""
_SHORT_PATTERN = 20
"""The bytes that rules save are shown if the patterns, or this many cells of longer ones, have room beside them."""
_BELOW_HERE = " " * len("here: ")
_LOADING = 5
"""The most lines about programs that load an export."""


class RecipePane(Pane):
    """Shows the rules in order, one in each line, and below them which rules decide the dtypes of the node under the cursor. When
    the pane has the focus, one of the rules is under its cursor, and keys change that rule.
    """

    TITLE = "Recipe"
    HELP = (
        "Rules in the order in which they apply, with the number of tensors that each matches and, if there is room, the bytes "
        "that it saves on those that it decides; the last rule that matches wins. r goes to the rules: Enter changes the one under "
        "the cursor, 1 to 8 its dtype, K and J move it, space disables it, x deletes it, u undoes. A disabled rule has no number. "
        "It casts nothing, and a saved recipe leaves it out; only the session keeps it. Here: how many tensors of the node under "
        "the tree's cursor get their dtype from which rule, and how many are never cast, such as those of quantized weights. "
        "Last: the programs that load an export of the recipe, by their own rules: ✓ with these values, ≈ with other values, ✗ not "
        "at all. The save window says why not."
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "screen.edit_rule", "Change the rule"),
        *(Binding(str(i), f"cast('{dtype}')", "The rule's dtype", show=False) for i, dtype in enumerate(DIGITS, 1)),
        Binding("K,shift+up", "move(-1)", "Move the rule up"),
        Binding("J,shift+down", "move(1)", "Move the rule down"),
        Binding("space", "switch", "Disable or enable the rule"),
        Binding("x,delete", "delete", "Delete the rule"),
    ]

    def __init__(self, controller: Controller, id: str) -> None:
        super().__init__(controller.experiment, id)
        self._controller = controller
        self.cursor = 0
        self._top = 0
        self._saved: tuple[Plan, list[int]] | None = None
        self._loads: tuple[Plan, str, tuple[Loading, ...] | None] | None = None
        """(A plan, the setting of activations, how programs load an export of this, or None while it is computed)."""

    # -- changing rules ------------------------------------------------------------------------------------------

    @property
    def current(self) -> Rule | None:
        """The rule under the pane's cursor, or None if there are no rules."""
        rows = self.experiment.rules.rows
        return rows[min(self.cursor, len(rows) - 1)].rule if rows else None

    def has_rule(self) -> bool:
        """Return whether there is a rule to change. If there is none, tell the user."""
        if self.current is None:
            self._controller.notify("there are no rules yet: c adds one", "information")
        return self.current is not None

    def go_to_deciding_rule(self, node: str) -> None:
        """Put the cursor on the last rule that matches tensors of a node or, if there is none, on the last rule."""
        effects = effects_on(self.experiment.tree, self.experiment.plan, node)
        indices = self.experiment.rules.indices
        self.cursor = indices.index(effects[0].index) if effects else max(0, len(indices) - 1)
        self.show_again()

    def action_step(self, step: int) -> None:
        self.cursor = max(0, min(self.cursor + step, len(self.experiment.rules.rows) - 1))
        self.show_again()

    def action_move(self, step: int) -> None:
        if self.has_rule():
            moved = self.experiment.rules.moved(self.cursor, step)
            self.cursor = max(0, min(self.cursor + step, len(moved.rows) - 1))
            self._controller.apply_rules(moved)

    def action_switch(self) -> None:
        if self.has_rule():
            self._controller.apply_rules(self.experiment.rules.toggled(self.cursor))

    def action_delete(self) -> None:
        if self.has_rule():
            self._controller.apply_rules(self.experiment.rules.without_row(self.cursor))

    def action_cast(self, dtype: str) -> None:
        if self.has_rule() and (rule := self.current) is not None:
            self._controller.change_rule(self.cursor, Rule.make(rule.pattern, dtype))

    def on_click(self, event: events.Click) -> None:
        row = event.y - (1 if self.is_framed else 0) + self._top
        if 0 <= row < len(self.experiment.rules.rows):
            self.cursor = row
            self.show_again()

    # -- drawing -------------------------------------------------------------------------------------------------

    def corner(self, activity: str) -> Text:
        rules = self.experiment.rules.rows
        return Text(f"{plural(len(rules), 'rule')}  {'u undo' if self.has_focus else 'r edit'}" if rules else "", "dim")

    def draw(self, activity: str, node: str) -> Text:
        rows = self.experiment.rules.rows
        if not rows:
            return Text(
                "No rules: every tensor is as stored.\nc casts by a pattern, 1 to 8 cast the node.", style="dim"
            )
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        below = self._about_node(node)[: max(1, self.lines - len(rows) - 1)]
        rest = self.lines - len(rows) - len(below) - 1
        if rest > 0:
            below += [Text(line, "dim") for line in loading_lines(self._loadings(), self.columns, min(rest, _LOADING))]
        room = max(1, self.lines - len(below) - 1)
        lines = self._rules(room)
        lines += [Text()] * max(0, min(1, self.lines - len(lines) - len(below)))
        return Text("\n").join([*lines, *below])

    def _loadings(self) -> tuple[Loading, ...] | None:
        """Return how programs load an export of the recipe, or None while a thread finds it."""
        experiment = self.experiment
        plan, activations = experiment.plan, experiment.settings.quantize_activations
        if self._loads is None or self._loads[0] is not plan or self._loads[1] != activations:
            self._loads = plan, activations, None
            find_loadings(self, experiment, plan, lambda found: self._loadings_found(plan, activations, found))
        found = self._loads[2]
        return () if found is None and not takes_a_thread(experiment, plan) else found

    def _loadings_found(self, plan: Plan, activations: str, found: tuple[Loading, ...]) -> None:
        if self._loads is not None and self._loads[0] is plan and self._loads[1] == activations:
            self._loads = (*self._loads[:2], found)
            self.show_again()

    def _rules(self, room: int) -> list[Text]:
        """Return the lines of those rules that fit into `room` lines. The rule under the cursor is among them."""
        rows, indices = self.experiment.rules.rows, self.experiment.rules.indices
        plan = self.experiment.plan
        self._top = max(0, min(self._top, len(rows) - room))
        if self.has_focus:
            self._top = max(self.cursor - room + 1, min(self._top, self.cursor))
        counts = [f"{len(plan.selections[at]):,}" if at is not None else "off" for at in indices]
        saved = [self._saved_by(at) for at in indices]
        badges = [pill(row.rule.dtype)[0] for row in rows]
        widths = [len(str(len(rows))), max(map(len, badges)), max(map(len, counts)), max(map(len, saved))]
        longest = max(min(_SHORT_PATTERN, len(row.rule.pattern)) for row in rows)
        if self.columns - sum(widths) - _GAPS < longest:
            widths[-1] = 0
        lines: list[Text] = []
        for place in range(self._top, len(rows)):
            at = indices[place]
            line = self._row(rows[place], at, (counts[place], saved[place]), widths)
            if self.has_focus and place == self.cursor:
                line = Text.assemble((EDGE, EDGE_STYLE), line[1:])
                line.pad_right(self.columns - line.cell_len)
                line.stylize_before(cursor_style(self))
            lines.append(line)
            if at is not None and (warning := self._warning(at)):
                lines.append(Text(f"   {warning}", "bold" if "⚠" in warning else "dim"))
            if len(lines) >= room:
                hidden = len(rows) - place - 1
                if hidden and not self.has_focus and len(lines) > 1:
                    lines[room - 1 :] = [Text(f"   and {hidden + 1} more", "dim")]
                break
        return lines[:room]

    def _row(self, row: ListedRule, at: int | None, effect: tuple[str, str], widths: Sequence[int]) -> Text:
        """Return the line of a rule. at: the rule's index in the recipe, or None if it is disabled. effect: the number of tensors
        that it matches, and the bytes that it saves. widths: in cells, of the columns of numbers, badges, counts and bytes.
        """
        badge, style = pill(row.rule.dtype)
        numbers, badges, counts, sizes = widths
        count, saved = effect
        words = f" · {saved:>{sizes}}" if sizes and saved else " " * (3 + sizes if sizes else 0)
        room = self.columns - numbers - 3 - badges - 1 - counts - 1 - len(words)
        pattern = truncate(printable(row.rule.pattern, 500), max(4, room))
        number = f" {at + 1 if at is not None else '–':<{numbers}} "
        gap = " " * (badges - len(badge) + 1)
        if at is None:
            return Text(f"{number}{pattern:<{room}} {badge}{gap}{count:>{counts}}{words}", "dim")
        return Text.assemble(
            (number, "dim"), f"{pattern:<{room}} ", (badge, style), gap, (f"{count:>{counts}}{words}", "dim")
        )

    def _saved_by(self, at: int | None) -> str:
        """Return how many bytes a rule saves on the tensors whose dtype it decides, such as "-6.4 MiB", or "" if none."""
        plan, tree = self.experiment.plan, self.experiment.tree
        if self._saved is None or self._saved[0] is not plan:
            sums = [0] * len(plan.recipe)
            for name, index in plan.decided_by.items():
                if (tensor := tree.tensors.get(name)) is not None:  # a KV cache is no part of the planned bytes
                    sums[index] += tensor.nbytes - tensor_bytes(tensor, plan.dtypes[name])
            self._saved = plan, sums
        saved = self._saved[1][at] if at is not None else 0
        return f"{'-' if saved > 0 else '+'}{short_bytes(abs(saved))}" if saved else ""

    def _warning(self, at: int) -> str:
        plan = self.experiment.plan
        if at in plan.too_slow:
            return "⚠ takes too long to match"
        if at in plan.unmatched:
            known = self.experiment.model.has_tree
            return "⚠ matches nothing in this model" if known else "waits for the model's tensors"
        return "waits for the model's classes" if at in plan.pending_classes else ""

    def _about_node(self, node: str) -> list[Text]:
        """Return lines that say how many tensors of a node get their dtype from which rule."""
        lines: list[str] = []
        for words in counts_by_rule(self.experiment.tree, self.experiment.plan, node):
            joined = f"{lines[-1]}, {words}" if lines else f"here: {words}"
            if lines and len(joined) > self.columns:
                lines.append(f"{_BELOW_HERE}{words}")
            else:
                lines[-1:] = [joined]
        # The blanks at the end have the style of the words, which saves bytes at each move of the cursor on a slow connection.
        return [Text(f"{line:<{self.columns}}", "dim") for line in lines]
