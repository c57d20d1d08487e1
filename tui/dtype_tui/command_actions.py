"""What the `:` commands that take words do in the app. Raises UserError, which the app shows as a notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtype_engine.errors import UserError
from dtype_engine.text import printable

if TYPE_CHECKING:
    from .app import DtypeApp


def leave_with(app: DtypeApp, kind: str, said: str) -> None:
    """Write one of the leaving screen's kinds to a path. Only that screen, which asks before, replaces what is there."""
    from .leaving_screen import where, wish_for

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
    app.put_in_force(made.recipe(app.experiment.tree))
