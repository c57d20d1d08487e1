"""Runs the commands of the `:` line that have arguments, and completes partly typed lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dtype_engine.core.atomic_write import is_taken
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded
from dtype_engine.recipe import Rule
from dtype_tui.config.bindings import KEYS
from dtype_tui.state.commands import Completer, all_commands, of_keys
from dtype_tui.state.controller import Controller
from dtype_tui.state.folds import patterns_for
from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.tree_columns import COLUMNS
from dtype_tui.widgets.tree_rows import ORDERS


class CommandWords:
    """The commands of the `:` line that act on the tree and the controller. They raise UserError for invalid arguments."""

    def __init__(self, controller: Controller, tree: ModuleTree) -> None:
        self._controller = controller
        self._tree = tree
        self.actions: Mapping[str, Callable[..., None]] = {
            "cast_as": lambda pattern, dtype: controller.add_rule(Rule.make(pattern, dtype)),
            "filter_by": self.filter_by,
            "go_to": self.go_to,
            "sort_by": self.sort_by,
            "show_columns": self.show_columns,
            "use_context": self.use_context,
            "use_budget": self.use_budget,
            "use_theme": self.use_theme,
            "use_preset": controller.use_preset,
            "export_to": lambda folder: self.save_to("checkpoint", folder),
            "save_recipe_to": lambda file: self.save_to("recipe", file),
            "save_report_to": lambda file: self.save_to("report", file),
        }
        """By `Command.action`, the function to call with the command's arguments."""

    def filter_by(self, text: str = "") -> None:
        """Show only nodes whose names contain `text` or match it as a glob, and go to the first of them. "" shows all nodes."""
        self._tree.set_filter(text)
        if not self._tree.next_match(1) and text:
            self._controller.notify(f"no name contains {text}", "information")

    def go_to(self, name: str) -> None:
        if not self._tree.go_to(name):
            raise UserError(f"there is no {printable(name, 200)} in this model")

    def sort_by(self, order: str) -> None:
        """Sort the children of every node by one of `ORDERS`, such as "drift"."""
        if order not in ORDERS:
            raise UserError(f"children are sorted by {', '.join(ORDERS)}")
        self._tree.sort_by(order)
        self._controller.notify(f"children in order of {'the model' if order == 'model' else order}", "information")

    def use_context(self, tokens: str, sequences: str = "1") -> None:
        numbers = [text.replace(",", "").replace("_", "") for text in (tokens, sequences)]
        if not all(text.isdecimal() and 0 < len(text) < 9 and int(text) for text in numbers):
            raise UserError("write the number of tokens and, if you like, of sequences, such as context 8192 4")
        context, batch = map(int, numbers)
        self._controller.set_context(context, batch)

    def show_columns(self, words: str = "") -> None:
        """Show only the columns that `words` names, separated by blanks or commas. "" shows all of `COLUMNS`."""
        wanted = words.replace(",", " ").split() or list(COLUMNS)
        if not set(wanted) <= set(COLUMNS):
            raise UserError(f"columns are {', '.join(COLUMNS)}; the name and the dtype are always shown")
        self._tree.hide(frozenset(COLUMNS) - set(wanted))

    def use_theme(self, name: str) -> None:
        themes = self._tree.app.available_themes
        if name not in themes:
            raise UserError(f"there is no theme {printable(name, 40)}; there are {', '.join(sorted(themes))}")
        self._tree.app.theme = name

    def save_to(self, kind: str, typed: str) -> None:
        """Write a file of one of the save screen's `KINDS` to the path `typed`. Raises UserError instead of replacing a file."""
        from dtype_tui.screens.save import WRITTEN_THERE, save_request

        experiment = self._controller.experiment
        if not experiment.model.has_tree:
            raise UserError("there is nothing to write before the model's tensors are known")
        there = bool(self._controller.engine.host) and kind in WRITTEN_THERE
        if not there and is_taken(typed):
            raise UserError(f"{printable(typed, 200)} already exists: to replace it, use e, which asks first")
        path = Path(typed) if there else expanded(typed)
        self._controller.save(save_request(kind, path, False, experiment.results))

    def use_budget(self, size: str = "") -> None:
        """Set the memory for which recipes are judged, such as "12GiB", or none if `size` is ""."""
        from dtype_engine.search.constraints import parse_bytes  # it would hold up the first keys for 25 ms

        self._controller.set_budget(parse_bytes(size, 0) if size else None)

    def completer(self, chosen: Mapping[str, str]) -> Completer:
        """Return a completer for key actions, commands with arguments, and the names of this model's nodes. chosen: the user's own
        keys, by binding id.
        """
        keys = [command for command in of_keys(KEYS, chosen) if command.action != "command"]
        experiment = self._controller.experiment
        return Completer(
            all_commands(keys),
            lambda: experiment.tree.names[0],
            lambda: patterns_for(experiment.tree, self._tree.current.name),
            self._choices,
            self._controller.read_only,
        )

    def _choices(self, kind: str) -> list[str]:
        if kind == "preset":
            from dtype_engine.recipe.presets import preset_names  # imported late, for a faster first paint

            return preset_names()
        choices = {"order": ORDERS, "columns": COLUMNS, "theme": sorted(self._tree.app.available_themes)}
        return list(choices.get(kind, ()))
