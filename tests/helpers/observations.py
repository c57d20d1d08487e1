"""Functions with which tests of keys observe the app."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.helpers.scenes import causes, inputs
from tests.helpers.screen_text import lines
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widgets import Input

from dtype_engine.service import events
from dtype_engine.service.jobs import CAUSES
from dtype_tui.app import DtypeApp
from dtype_tui.widgets.module_tree import ModuleTree

MLP = "model.layers.3.mlp"
Look = Callable[[DtypeApp], Any]


def cursor(app: DtypeApp) -> str:
    return app.query_one(ModuleTree).current.name


def rules(app: DtypeApp) -> list[str]:
    return [str(rule) for rule in app.controller.experiment.recipe.rules]


def top(app: DtypeApp) -> str:
    return type(app.screen).__name__


def typed(app: DtypeApp) -> str:
    """The text of the input line that has the focus."""
    return app.focused.value if isinstance(app.focused, Input) else "no line"


def typing(app: DtypeApp) -> bool:
    return isinstance(app.focused, Input)


def marked_line(app: DtypeApp) -> str:
    """The line with the mark of the choice, from the mark on."""
    (line,) = (line.partition("│ ▌")[2] for line in lines(app) if "│ ▌" in line)
    return " ".join(f"▌{line}".partition("│")[0].split())


def chosen(app: DtypeApp) -> str:
    return marked_line(app).split()[1]


def scrolled(app: DtypeApp) -> float:
    return next(iter(app.screen.query(VerticalScroll))).scroll_y


def at_end(app: DtypeApp) -> bool:
    box = next(iter(app.screen.query(VerticalScroll)))
    return box.scroll_y == box.max_scroll_y


async def wait(app: DtypeApp, pilot: Pilot[None], look: Look, seen: Any) -> None:
    for _ in range(400):
        if look(app) == seen:
            return
        await pilot.pause(0.01)


def many_inputs(app: DtypeApp) -> events.Event:
    few = inputs(app)
    assert isinstance(few, events.InputsReady)
    return events.InputsReady(dataclasses.replace(few.summary, batches=few.summary.batches * 20))


def many_causes(app: DtypeApp) -> events.Event:
    few = causes(app)
    assert isinstance(few, events.JobDone)
    found = events.result_of(few, CAUSES)
    assert found is not None
    return events.JobDone(few.recipe, few.ask, dataclasses.replace(found, causes=found.causes * 20))
