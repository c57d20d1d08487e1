"""The `:` commands in the app: what completes them, and what those that take words do. Raises UserError, which the app shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.recipe import generalisations
from dtype_tui.recipe_actions import replace_all
from dtype_tui.state.commands import Completer, all_commands
from dtype_tui.widgets.module_tree import COLUMNS, ORDERS

if TYPE_CHECKING:
    from dtype_tui.app import DtypeApp


def completer(app: DtypeApp) -> Completer:
    """What may stand in a line: the keys' actions, the commands with words, and this model's names."""
    actions = [
        (binding.action, binding.description)
        for binding in app.BINDINGS
        if isinstance(binding, Binding) and binding.action not in ("command", "filter", "cast")
    ]

    def patterns() -> list[str]:
        here = app.tree_view.current.name
        module = app.experiment.tree.modules.get(here)
        return generalisations(here, module.class_name if module is not None else None)

    return Completer(
        all_commands(actions), lambda: app.experiment.tree.names[0], patterns, lambda kind: _choices(app, kind)
    )


def _choices(app: DtypeApp, kind: str) -> list[str]:
    if kind == "preset":
        from dtype_engine.recipe.presets import PRESETS  # not for the first paint

        return list(PRESETS)
    found = {"order": ORDERS, "columns": COLUMNS, "theme": sorted(app.available_themes)}
    return list(found.get(kind, ()))


def filter_by(app: DtypeApp, text: str) -> None:
    """Show only names with this in them, and go to the first; an empty text shows all."""
    app.tree_view.set_filter(text)
    if app.tree_view.matches:
        app.tree_view.next_match(1)
    elif text:
        app.say(f"no name has {text} in it", "information")


def go_to(app: DtypeApp, name: str) -> None:
    """Go to a node by its name."""
    if not app.tree_view.go_to(name):
        raise UserError(f"there is no {printable(name, 200)} in this model")


def sort_by(app: DtypeApp, order: str) -> None:
    """Put children in one of the orders."""
    if order not in ORDERS:
        raise UserError(f"children are sorted by {', '.join(ORDERS)}")
    app.tree_view.sort_by(order)
    app.say(f"children in order of {'the model' if order == 'model' else order}", "information")


def show_columns(app: DtypeApp, words: str) -> None:
    """Show these columns of those that can be left out; no words show all."""
    wanted = words.replace(",", " ").split() or list(COLUMNS)
    if not set(wanted) <= set(COLUMNS):
        raise UserError(f"columns are {', '.join(COLUMNS)}; the name and the dtype are always there")
    app.tree_view.hide(frozenset(COLUMNS) - set(wanted))


def use_theme(app: DtypeApp, name: str) -> None:
    """Other colours."""
    if name not in app.available_themes:
        raise UserError(f"there is no theme {printable(name, 40)}; there are {', '.join(sorted(app.available_themes))}")
    app.theme = name


def leave_with(app: DtypeApp, kind: str, said: str) -> None:
    """Write one of the leaving screen's kinds to a path. Only that screen, which asks before, replaces what is there."""
    from dtype_tui.screens.save import where, wish_for

    if not app.has_tree:
        raise UserError("there is nothing to write before the model is there")
    path, taken = where(said)
    if taken:
        raise UserError(f"{printable(said, 200)} is there already: e asks before it replaces what is there")
    app.wish(wish_for(kind, path, False, app.experiment.report))


def use_preset(app: DtypeApp, name: str) -> None:
    """Put a preset in force, in place of all rules."""
    from dtype_engine.recipe.presets import preset

    made = preset(name)
    if not app.has_tree:
        raise UserError("a preset is made for a model: it is not there yet")
    replace_all(app, made.recipe(app.experiment.tree))
