"""Functions with which tests of keys observe the app, and scenes that bring the app to the place of a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.helpers.recording_engine import engine, say
from tests.helpers.scenes import DOWN, Scene, causes, inputs, ready, scanned
from tests.helpers.screen_text import lines
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widgets import DataTable, Input

from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.runs import Generation, Written
from dtype_engine.service import events
from dtype_engine.service.jobs import CAUSES, GENERATE, NONFINITE
from dtype_tui.app import DtypeApp
from dtype_tui.widgets.module_tree import ModuleTree

MLP = "model.layers.3.mlp"
Look = Callable[[DtypeApp], Any]

# -- what to look at ------------------------------------------------------------------------------------------------


def last_command(app: DtypeApp) -> str:
    """The last command that the app sent to the engine."""
    return engine(app).commands[-1]


def cursor(app: DtypeApp) -> str:
    return app.query_one(ModuleTree).current.name


def line(app: DtypeApp) -> int:
    return app.query_one(ModuleTree).cursor


def opened(app: DtypeApp) -> set[str]:
    """Names in the tree below the node under the cursor."""
    tree = app.query_one(ModuleTree)
    return {row.name for row in tree.rows if row.name.startswith(f"{tree.current.name}.")}


def rules(app: DtypeApp) -> list[str]:
    return [str(rule) for rule in app.controller.experiment.recipe.rules]


def last_rule(app: DtypeApp) -> str:
    return rules(app)[-1] if rules(app) else ""


def top(app: DtypeApp) -> str:
    return type(app.screen).__name__


def title(app: DtypeApp) -> str:
    boxes = [str(box.border_title) for box in app.screen.query(VerticalScroll) if box.border_title]
    return boxes[0] if boxes else ""


def focus(app: DtypeApp) -> str | None:
    return app.focused.id if app.focused is not None else None


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


def place(app: DtypeApp) -> int:
    """Index of the marked line in a window of lines to choose from."""
    view: Any = app.screen
    return int(view.index)


def row(app: DtypeApp) -> int:
    return app.screen.query_one(DataTable).cursor_row


def scrolled(app: DtypeApp) -> float:
    return next(iter(app.screen.query(VerticalScroll))).scroll_y


def at_end(app: DtypeApp) -> bool:
    box = next(iter(app.screen.query(VerticalScroll)))
    return box.scroll_y == box.max_scroll_y


def pane(app: DtypeApp) -> str:
    return next(pane.title for pane in app.main.side.panes if pane.display)


def point(app: DtypeApp) -> int:
    """Index of the point of the Pareto front; -1 for the last."""
    view: Any = app.screen
    return -1 if view.index == len(view.front.points) - 1 else view.index


def on_page(page: Callable[[Any], Any]) -> Look:
    """Observes the topmost screen."""
    return lambda app: page(app.screen)


def bottom(words: str) -> Look:
    """Observes whether the last line contains these words."""
    return lambda app: words in lines(app)[-1]


def said(words: str) -> Look:
    """Observes whether the screen shows these words."""
    return lambda app: words in "\n".join(lines(app))


# -- how to get there -----------------------------------------------------------------------------------------------


def press(*keys: str) -> Scene:
    async def scene(app: DtypeApp, pilot: Pilot[None]) -> None:
        await pilot.press(*keys)
        await pilot.pause()

    return scene


def at(node: str, scene: Scene = ready) -> Scene:
    async def there(app: DtypeApp, pilot: Pilot[None]) -> None:
        await scene(app, pilot)
        assert app.query_one(ModuleTree).go_to(node)
        await pilot.pause()

    return there


def long_failure(app: DtypeApp) -> events.Event:
    """A failure whose words fill more lines than a pane has."""
    return events.Failed(app.controller.experiment.recipe, "no kernel " * 400, None)


async def much_said(app: DtypeApp, pilot: Pilot[None]) -> None:
    """More messages than a box has lines."""
    await ready(app, pilot)
    for number in range(40):
        app.notify(f"sentence {number}")
    await pilot.pause()


def cast(rule: str, scene: Scene = ready) -> Scene:
    async def there(app: DtypeApp, pilot: Pilot[None]) -> None:
        await scene(app, pilot)
        app.query_one(ModuleTree).go_to(rule)
        await pilot.press("2")

    return there


def wait_after(what: Look, *keys: str) -> Scene:
    """Press the keys, and wait until a thread of the app has made `what` true."""

    async def there(app: DtypeApp, pilot: Pilot[None]) -> None:
        await pilot.press(*keys)
        await wait(app, pilot, what, True)

    return there


async def wait(app: DtypeApp, pilot: Pilot[None], look: Look, seen: Any) -> None:
    for _ in range(400):
        if look(app) == seen:
            return
        await pilot.pause(0.01)


def not_finite(app: DtypeApp) -> events.Event:
    found = NonFiniteDiagnosis(
        "activation", DOWN, MLP, "mul", "float16", 65504.0, (), 1.1e4, 2.1e5, (f"{MLP}=bfloat16",)
    )
    return events.JobDone(app.controller.experiment.recipe, NONFINITE.ask(None), found)


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


def half_scanned(app: DtypeApp) -> events.Event:
    found = scanned(app)
    assert isinstance(found, events.ScanUpdated)
    return events.ScanUpdated(found.report, False)


async def much_text(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The window for generated texts, with more lines than it has room for."""
    await ready(app, pilot)
    await pilot.press("g", "enter")
    lines = tuple(f"line {number}\n" for number in range(80))
    written = Written(tuple(range(80)), lines, 0.5)
    found = Generation("", written, written)
    await say(app, pilot, events.JobDone(app.controller.experiment.recipe, GENERATE.ask(None), (found,)))
    await pilot.pause()
