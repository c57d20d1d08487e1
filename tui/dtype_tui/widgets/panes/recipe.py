"""The Recipe pane: the current recipe's rules, and which of them decide the dtypes of the node under the cursor."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_tui.rendering.cells import truncate
from dtype_tui.rendering.palette import colour
from dtype_tui.state.node_rules import effects_on, never_cast_count
from dtype_tui.widgets.panes.base import Pane


class RecipePane(Pane):
    """Shows the rules in order, and below them which rules decide the dtypes of the node under the cursor, and how many of its
    tensors are never cast.
    """

    HELP = (
        "Rules in the order in which they were made, with the number of tensors that each matches; the last rule that matches "
        "wins. Below: the rules that match the node under the cursor, and how many of its tensors are "
        "never cast, such as those of quantised weights."
    )

    def draw(self, activity: str, node: str) -> Text | Table:
        experiment = self.experiment
        plan = experiment.plan
        text = Text()
        if not experiment.recipe.rules:
            text.append("No rules: every tensor is as stored.\n", style="dim")
            text.append("c casts by a pattern, 1 to 8 cast the node.", style="dim")
            return text
        for index, rule in enumerate(experiment.recipe.rules):
            taken = len(plan.selections[index])
            dtype = "stored" if rule.dtype == dtypes.STORED else dtypes.short_name(rule.dtype)
            width = max(8, self.columns - len(dtype) - len(f"{taken:,}") - 8)
            text.append(f"{index + 1:>2} ", style="dim")
            text.append(truncate(printable(rule.pattern, 500), width))
            text.append(" → ", style="dim")
            text.append(dtype, style=f"bold {colour(rule.dtype)}")
            if index in plan.too_slow:
                text.append("\n   ⚠ takes too long to match", style="bold")
            elif index in plan.unmatched:
                text.append("\n   ⚠ matches nothing in this model", style="bold")
            elif index in plan.pending_classes:
                text.append("\n   waits for the model's classes", style="dim")
            else:
                text.append(f"  {taken:,}", style="dim")
            text.append("\n")
        rows = effects_on(experiment.tree, experiment.plan, node)
        label = truncate(printable(node.rpartition(".")[2] or "the model", 200), max(8, self.columns - 14))
        if not rows:
            text.append(f"{label}: as stored\n", style="dim")
        for effect in rows:
            won, taken = effect.decides, len(effect.tensors)
            verdict = "decides" if won == taken else "loses" if won == 0 else f"decides {won} of {taken}"
            text.append(f"{label}: ", style="dim")
            text.append(f"rule {effect.index + 1} {verdict}\n", style="" if won else "dim")
        if fixed := never_cast_count(experiment.tree, node):
            text.append(f"{label}: {plural(fixed, 'tensor')} never cast\n", style="dim")
        text.right_crop(1)
        return text
