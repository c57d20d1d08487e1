"""What keys do with the node under the cursor, and to get to one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtype_tui.app import DtypeApp

LOOKED_AT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
"""Dtypes that a tensor's values are looked at for."""


def values(app: DtypeApp) -> None:
    """Have the engine read the values of the tensor."""
    tensor = app.tree_view.current.tensor
    if tensor is None:
        app.say("values are those of a tensor: go to one", "information")
    else:
        app.engine.look_at(tensor.name, LOOKED_AT)
        app.expect("values")


def go_to_worst(app: DtypeApp) -> None:
    """Go to the module that drifts most; from there to the next worst, and round."""
    names = [reading.name for reading in app.experiment.worst_modules()]
    if not names:
        app.say("no module drifts yet", "information")
        return
    again = app.worst in names and app.worst == app.tree_view.current.name
    app.worst = names[(names.index(app.worst) + 1) % len(names)] if again else names[0]
    app.tree_view.go_to(app.worst)


def copy_rules(app: DtypeApp) -> None:
    """Copy the rules in force as options of the command line."""
    rules = app.experiment.recipe.rules
    copy(app, " ".join(f"--cast {shlex.quote(str(rule))}" for rule in rules), "the rules as --cast options")


def copy(app: DtypeApp, text: str, what: str) -> None:
    """To the clipboard of the terminal, which over SSH is the one of the person who looks at it (OSC 52)."""
    if text:
        app.copy_to_clipboard(text)
        app.say(f"copied {what}: {text}", "information")
    else:
        app.say("no rules to copy: every tensor is as stored", "information")
