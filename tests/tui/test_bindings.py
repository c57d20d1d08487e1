"""Every key that the help names, pressed, with what it does; the same actions from the palette and the command line; and every
screen at 80 x 24.

A walk brings a place up and presses its keys one after the other. Before a key, what it is to bring about must not be there
yet, so one that does nothing fails.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from noting import engine, make_app
from rich.cells import cell_len
from rich.text import Text
from rows import lines, notices
from scenes import DOWN, SCENES, Scene, after, causes, inputs, measuring, mixed, ready, scanned, told
from textual.binding import Binding
from textual.containers import ScrollableContainer, VerticalScroll
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static

import dtype_tui
from dtype_engine import events
from dtype_engine.readings_drift import Nonfinite
from dtype_engine.recipe.presets import PRESETS
from dtype_engine.wishes import ExportWish, RecipeWish, ReportWish
from dtype_tui.app import DIGITS, DtypeApp
from dtype_tui.commands import WITH_ARGUMENTS
from dtype_tui.help import sections
from dtype_tui.keys import on_keyboard
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ModuleTree

SMALL = (80, 24)
MLP = "model.layers.3.mlp"
Look = Callable[[DtypeApp], Any]


@dataclass(frozen=True)
class Key:
    """A key, what to look at, and what is to be seen there after it, and not before."""

    key: str
    look: Look
    seen: Any


@dataclass(frozen=True)
class Walk:
    """Keys of one place, one after the other; a Scene among them only gets there."""

    place: str
    scene: Scene
    steps: tuple[Key | Scene, ...]


# -- what to look at ------------------------------------------------------------------------------------------------


def asked(app: DtypeApp) -> str:
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
    return [str(rule) for rule in app.experiment.recipe.rules]


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
    """In the line that has the focus."""
    return app.focused.value if isinstance(app.focused, Input) else "no line"


def typing(app: DtypeApp) -> bool:
    return isinstance(app.focused, Input)


def here(app: DtypeApp) -> str:
    """The line with the mark of what is chosen."""
    (line,) = (line for line in lines(app) if "›" in line and "‹" not in line)
    return " ".join(line[line.index("›") :].partition("│")[0].split())


def chosen(app: DtypeApp) -> str:
    return here(app).split()[1]


def row(app: DtypeApp) -> int:
    return app.screen.query_one(DataTable).cursor_row


def scrolled(app: DtypeApp) -> float:
    return next(iter(app.screen.query(VerticalScroll))).scroll_y


def pane(app: DtypeApp) -> str:
    return next(str(pane.border_title) for pane in app.side.panes if pane.display)


def point(app: DtypeApp) -> int:
    """Of the front; the last is -1."""
    view: Any = app.screen
    return -1 if view.place == len(view.front.points) - 1 else view.place


def on(page: Callable[[Any], Any]) -> Look:
    """Something of the screen that is in front."""
    return lambda app: page(app.screen)


def bottom(words: str) -> Look:
    """Whether the last line has these words."""
    return lambda app: words in lines(app)[-1]


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


def cast(rule: str, scene: Scene = ready) -> Scene:
    async def there(app: DtypeApp, pilot: Pilot[None]) -> None:
        await scene(app, pilot)
        app.query_one(ModuleTree).go_to(rule)
        await pilot.press("2")

    return there


def once(what: Look, *keys: str) -> Scene:
    """After the keys, what a thread works out is there."""

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
    found = Nonfinite("activation", DOWN, MLP, "mul", "float16", 65504.0, (), 1.1e4, 2.1e5, f"{MLP}=bfloat16")
    return events.NonfiniteFound(app.experiment.recipe, found)


def many_inputs(app: DtypeApp) -> events.Event:
    few = inputs(app)
    assert isinstance(few, events.InputsReady)
    return events.InputsReady(dataclasses.replace(few.reading, batches=few.reading.batches * 20))


def many_causes(app: DtypeApp) -> events.Event:
    few = causes(app)
    assert isinstance(few, events.CausesTold)
    return events.CausesTold(few.recipe, dataclasses.replace(few.report, causes=few.report.causes * 20))


def half_scanned(app: DtypeApp) -> events.Event:
    found = scanned(app)
    assert isinstance(found, events.Scanned)
    return events.Scanned(found.report, False)


# -- the walks ------------------------------------------------------------------------------------------------------

back = press("escape")
MAIN = "Casting and measuring"
IN_MAIN = (
    Walk(
        MAIN,
        at(MLP),
        (
            *(Key(str(number), last_rule, f"{MLP}={dtype}") for number, dtype in enumerate(DIGITS, 1)),
            Key("u", last_rule, f"{MLP}=int8"),
            Key("ctrl+r", last_rule, f"{MLP}=stored"),
            Key("x", rules, []),
        ),
    ),
    Walk(
        MAIN,
        mixed,
        (
            Key("w", cursor, "model.layers.5.mlp.down_proj"),
            Key("z", lambda app: app.query_one(ModuleTree).order, "bytes"),
            Key("y", lambda app: app.clipboard, "model.layers.5.mlp.down_proj"),
            Key(
                "Y",
                lambda app: app.clipboard,
                "--cast '*=bfloat16' --cast '*norm*=float32' --cast 'model.layers.{4..5}.mlp=float8_e4m3fn'",
            ),
            Key("d", top, "CausesScreen"),
            back,
            Key("H", top, "HistoryScreen"),
            back,
            Key("p", top, "PresetsScreen"),
            back,
            Key("e", top, "LeavingScreen"),
            back,
            Key("i", top, "InputsScreen"),
            back,
            Key("comma", top, "SettingsScreen"),
            back,
            Key("question_mark", title, "Help"),
            back,
            Key("ctrl+p", top, "CommandPalette"),
            back,
            Key("enter", title, "down_proj"),
            back,
            Key("f", asked, "flow"),
            Key("g", asked, "generate 48"),
            Key("t", asked, "speed"),
            Key("m", asked, "measure"),
        ),
    ),
    Walk(
        MAIN,
        at("model.embed_tokens.weight"),
        (
            Key("v", asked, "look at model.embed_tokens.weight"),
            Key("s", top, "ScanSetup"),
            back,
            told(press(), scanned),
            Key("o", top, "OptimiseScreen"),
        ),
    ),
    Walk(
        MAIN,
        told(cast(MLP), not_finite),
        (press("3"), told(press(), not_finite), Key("a", last_rule, f"{MLP}=bfloat16")),
    ),
    Walk(
        MAIN,
        at(MLP),
        (
            Key("c", typed, f"{MLP}=bf16"),
            back,
            Key("slash", focus, "filter-input"),
            press(*"mlp.up_proj.weight", "enter"),
            Key("n", cursor, "model.layers.4.mlp.up_proj.weight"),
            Key("N", cursor, "model.layers.3.mlp.up_proj.weight"),
            Key("colon", focus, "command-input"),
        ),
    ),
    Walk(MAIN, measuring, (Key("escape", asked, "cancel"),)),
    Walk(MAIN, ready, (Key("q", lambda app: app._exit, True),)),
)
OTHER_PLACES = (
    Walk(
        "In the tree",
        at("model.layers.3"),
        (
            Key("up", cursor, "model.layers.2"),
            Key("k", cursor, "model.layers.1"),
            Key("down", cursor, "model.layers.2"),
            Key("j", cursor, "model.layers.3"),
            Key("right", lambda app: MLP in opened(app), True),
            Key("l", cursor, "model.layers.3.input_layernorm"),
            Key("left", cursor, "model.layers.3"),
            Key("h", opened, set()),
            Key("space", lambda app: MLP in opened(app), True),
            Key("right_square_bracket", cursor, "model.layers.4"),
            Key("left_square_bracket", cursor, "model.layers.3"),
            Key("P", cursor, "model.layers"),
            Key("backspace", cursor, "model"),
            Key("E", lambda app: "model.layers.5.mlp.down_proj.weight" in opened(app), True),
            Key("W", opened, set()),
            Key("tab", pane, "Memory"),
        ),
    ),
    Walk(
        "In the tree",
        after(ready, "E"),
        (
            Key("pagedown", line, 9),
            Key("ctrl+f", line, 18),
            Key("pageup", line, 9),
            Key("ctrl+b", cursor, ""),
            Key("end", cursor, "model.norm.weight"),
            Key("home", cursor, ""),
            Key("G", cursor, "model.norm.weight"),
            Key("less_than_sign", cursor, ""),
            Key("greater_than_sign", cursor, "model.norm.weight"),
        ),
    ),
    Walk(
        "In the tree",
        cast("model.layers.2.mlp", cast("model.layers.1", cast("model.layers.4"))),
        (
            Key("right_curly_bracket", cursor, "model.layers.4"),
            Key("left_curly_bracket", cursor, "model.layers.2.mlp"),
        ),
    ),
    Walk(
        "In the cast prompt",
        after(at(MLP), "c"),
        (
            Key("tab", typed, "model.layers.*.mlp=bf16"),
            Key("shift+tab", typed, f"{MLP}=bf16"),
            Key("escape", focus, "tree"),
        ),
    ),
    Walk(
        "In the filter",
        after(ready, "slash", *"up_proj"),
        (Key("escape", lambda app: app.query_one(ModuleTree).filter_text, ""),),
    ),
    Walk(
        "In the command line",
        after(ready, "colon", *"sort bytes", "enter", "colon"),
        (
            Key("up", typed, "sort bytes"),
            Key("down", typed, ""),
            press(*"go model.layers."),
            Key("tab", typed, "go model.layers.0"),
            press("tab"),
            Key("shift+tab", typed, "go model.layers.0"),
            Key("escape", focus, "tree"),
        ),
    ),
    Walk(
        "In the settings",
        after(ready, "comma"),
        (
            Key("up", chosen, "storage-only"),
            Key("k", chosen, "floating"),
            Key("shift+tab", chosen, "autocast"),
            Key("down", chosen, "floating"),
            Key("j", chosen, "storage-only"),
            Key("tab", chosen, "autocast"),
            Key("right", here, "› autocast off [bf16] f16"),
            Key("l", here, "› autocast off bf16 [f16]"),
            Key("space", here, "› autocast [off] bf16 f16"),
            Key("left", here, "› autocast off bf16 [f16]"),
            Key("h", here, "› autocast off [bf16] f16"),
            Key("enter", lambda app: [settings.autocast for settings in engine(app).settings], ["bfloat16"]),
            press("comma"),
            Key("escape", top, "Screen"),
            press("comma"),
            Key("q", top, "Screen"),
        ),
    ),
    Walk(
        "In the inputs",
        told(ready, many_inputs, "i"),
        (
            Key("down", scrolled, 1),
            Key("pagedown", scrolled, 9),
            Key("up", scrolled, 8),
            Key("pageup", scrolled, 0),
            Key("escape", top, "Screen"),
        ),
    ),
    Walk(
        "In the dtypes to scan",
        after(ready, "s"),
        (
            Key("up", here, "› [ ] i8@t int8@tensor"),
            Key("k", here, "› [x] i8 int8"),
            Key("down", here, "› [ ] i8@t int8@tensor"),
            Key("j", here, "› [x] bf16 bfloat16"),
            Key("space", here, "› [ ] bf16 bfloat16"),
            Key("escape", top, "Screen"),
            press("s"),
            Key("q", top, "Screen"),
            press("s", "space"),
            Key("enter", asked, "scan float16,float8_e4m3fn,float8_e5m2,int8"),
        ),
    ),
    Walk(
        "In the scan",
        told(ready, scanned, "s"),
        (
            Key("right", lambda app: app.experiment.scan.dtype, "float8_e4m3fn"),
            Key("l", lambda app: app.experiment.scan.dtype, "int8"),
            Key("left", lambda app: app.experiment.scan.dtype, "float8_e4m3fn"),
            Key("h", lambda app: app.experiment.scan.dtype, "bfloat16"),
            Key("j", row, 1),
            Key("k", row, 0),
            Key("b", bottom("b by score"), True),
            Key("a", on(lambda page: page.query_one(DataTable).row_count), 3 * 56),
            Key("m", bottom("m ranking"), True),
            Key("m", bottom("m map"), True),
            Key("escape", top, "Screen"),
            press("s"),
            Key("q", top, "Screen"),
            press("s"),
            Key("s", top, "ScanSetup"),
            press("escape", "s"),
            Key("enter", top, "Screen"),
        ),
    ),
    Walk("In the scan", told(after(ready, "s", "enter"), half_scanned, "s"), (Key("space", asked, "pause"),)),
    Walk(
        "Along the front",
        told(ready, scanned, "o"),
        (
            once(on(lambda page: page.query_one(VerticalScroll).max_scroll_y > 2), "pageup", "pageup", *["left"] * 4),
            Key("down", scrolled, 1),
            Key("j", scrolled, 2),
            Key("up", scrolled, 1),
            Key("k", scrolled, 0),
            Key("enter", lambda app: app.experiment.recipe == app.screen.recipe, True),  # type: ignore[attr-defined]
            Key("u", rules, []),
            Key("home", point, 0),
            Key("right", point, 1),
            Key("l", point, 2),
            Key("left", point, 1),
            Key("h", point, 0),
            Key("pagedown", point, 10),
            Key("ctrl+f", point, 20),
            Key("pageup", point, 10),
            Key("ctrl+b", point, 0),
            Key("end", point, -1),
            Key("less_than_sign", point, 0),
            Key("greater_than_sign", point, -1),
            Key("slash", typing, True),
            Key("escape", typing, False),
            Key("colon", typing, True),
            back,
            Key("i", typing, True),
            back,
            Key("escape", top, "Screen"),
            press("o"),
            Key("q", top, "Screen"),
        ),
    ),
    Walk(
        "In drift over depth",
        told(after(mixed, "d"), many_causes),
        (
            once(on(lambda page: page.query_one(VerticalScroll).max_scroll_y > 0)),
            Key("j", scrolled, 1),
            Key("k", scrolled, 0),
            Key("escape", top, "Screen"),
            press("d"),
            Key("q", top, "Screen"),
            press("d"),
            Key("d", top, "Screen"),
        ),
    ),
    Walk(
        "In the history",
        SCENES["history"],
        (
            Key("p", lambda app: [entry.pinned for entry in app.experiment.measured], [False, False, False, True]),
            Key("j", row, 1),
            Key("k", row, 0),
            Key("c", on(lambda page: str(page.query_one(DataTable).get_cell_at((0, 0)))), "4*c"),
            press("j"),
            Key("c", title, "Two recipes side by side"),
            back,
            Key("enter", rules, ["*=float16"]),
            press("H"),
            Key("escape", top, "Screen"),
            press("H"),
            Key("q", top, "Screen"),
            press("H"),
            Key("H", top, "Screen"),
        ),
    ),
    Walk(
        "In the presets",
        ready,
        (
            once(on(lambda page: len(page._found) == len(PRESETS)), "p"),
            Key("down", chosen, "fp16-but-norms"),
            Key("j", chosen, "fp8-linears"),
            Key("tab", chosen, "norms-head-fp32"),
            Key("up", chosen, "fp8-linears"),
            Key("k", chosen, "fp16-but-norms"),
            Key("shift+tab", chosen, "all-bf16"),
            Key("enter", rules, ["*=bfloat16"]),
            press("p"),
            Key("escape", top, "Screen"),
            press("p"),
            Key("q", top, "Screen"),
            press("p"),
            Key("p", top, "Screen"),
        ),
    ),
    Walk(
        "In what to leave with",
        after(ready, "e"),
        (
            Key("down", chosen, "recipe"),
            Key("tab", chosen, "report"),
            Key("up", chosen, "recipe"),
            Key("shift+tab", chosen, "checkpoint"),
            Key("escape", top, "Screen"),
            press("e"),
            Key("enter", asked, "save"),
        ),
    ),
    Walk(
        "In a box of text",
        after(ready, "question_mark"),
        (
            Key("j", scrolled, 1),
            Key("k", scrolled, 0),
            Key("escape", top, "Screen"),
            press("question_mark"),
            Key("q", top, "Screen"),
            press("question_mark"),
            Key("enter", top, "Screen"),
            press("question_mark"),
            Key("question_mark", top, "Screen"),
        ),
    ),
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files are written to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DOWNLOAD_DIR", str(tmp_path))


Way = Callable[[DtypeApp, "Pilot[None]", str], Awaitable[None]]


async def by_key(app: DtypeApp, pilot: Pilot[None], key: str) -> None:
    await pilot.press(key)


async def by_palette(app: DtypeApp, pilot: Pilot[None], key: str) -> None:
    """What the palette offers under the words of the key."""
    binding = of_the_app(key)
    (found,) = (command for command in app.get_system_commands(app.screen) if command.title == binding.description)
    found.callback()


async def by_command(app: DtypeApp, pilot: Pilot[None], key: str) -> None:
    """The `:` command of the key's action."""
    name = of_the_app(key).action.replace("_", "-")
    await enter(app, pilot, name)


async def enter(app: DtypeApp, pilot: Pilot[None], line: str) -> None:
    await pilot.press("colon")
    app.query_one(CommandLine).query_one(Input).value = line
    await pilot.pause()
    await pilot.press("enter")


def of_the_app(key: str) -> Binding:
    (found,) = (binding for binding in DtypeApp.BINDINGS if isinstance(binding, Binding) and binding.key == key)
    return found


async def take(walk: Walk, way: Way = by_key, only: Callable[[str], bool] = lambda key: True) -> None:
    """Press the keys of a walk, those that are `only` of another way in that way."""
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await walk.scene(app, pilot)
        for step in walk.steps:
            if not isinstance(step, Key):
                await step(app, pilot)
                continue
            assert step.look(app) != step.seen, f"before {step.key}"
            await (way if only(step.key) else by_key)(app, pilot, step.key)
            await pilot.pause()
            await wait(app, pilot, step.look, step.seen)
            assert step.look(app) == step.seen, (step.key, notices(app))


def named(walk: Walk) -> str:
    return f"{walk.place}: {' '.join(step.key for step in walk.steps if isinstance(step, Key))}"[:60]


@pytest.mark.parametrize("walk", [*IN_MAIN, *OTHER_PLACES], ids=named)
async def test_every_key_does_what_the_help_says(walk: Walk) -> None:
    await take(walk)


def by_no_palette(key: str) -> bool:
    return of_the_app(key).action in ("quit", "help", "command_palette")


def by_no_command(key: str) -> bool:
    action = of_the_app(key).action
    return "(" in action or action in ("command", "filter", "cast")


@pytest.mark.parametrize("walk", IN_MAIN, ids=named)
async def test_the_palette_does_the_same(walk: Walk) -> None:
    await take(walk, by_palette, lambda key: not by_no_palette(key))


@pytest.mark.parametrize("walk", IN_MAIN[1:], ids=named)
async def test_the_command_line_does_the_same(walk: Walk) -> None:
    await take(walk, by_command, lambda key: not by_no_command(key))


async def test_ctrl_z_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives; tests/terminal has a process that really stops, and goes on."""
    monkeypatch.setattr(HeadlessDriver, "can_suspend", True)
    stopped: list[int] = []
    before = signal.signal(signal.SIGTSTP, lambda number, _: stopped.append(number))
    try:
        app = make_app()
        async with app.run_test(size=SMALL) as pilot:
            await pilot.press("ctrl+z")
            assert stopped == [signal.SIGTSTP]
    finally:
        signal.signal(signal.SIGTSTP, before)


def test_every_row_of_the_help_is_walked_and_no_other() -> None:
    shown, _ = sections(DtypeApp.BINDINGS, {}, ())
    named_by_the_help = {(place, key) for place, rows in shown for keys, _ in rows for key in keys.split(", ")}
    walked = {
        (walk.place, on_keyboard(step.key))
        for walk in (*IN_MAIN, *OTHER_PLACES)
        for step in walk.steps
        if isinstance(step, Key)
    }
    assert named_by_the_help == walked | {(MAIN, "Ctrl+z")}
    assert all(what for _, rows in shown for _, what in rows)


def test_every_place_with_keys_is_in_the_help() -> None:
    """Each class of the app that binds keys of its own, but for the screen to choose a model in and what leads to the tree's."""
    bound = {
        found.__name__
        for module in pkgutil.walk_packages(dtype_tui.__path__, "dtype_tui.")
        if module.name != "dtype_tui.__main__"
        for found in vars(importlib.import_module(module.name)).values()
        if isinstance(found, type) and found.__module__.startswith("dtype_tui") and "BINDINGS" in vars(found)
    }
    shown, _ = sections(DtypeApp.BINDINGS, {}, ())
    assert len(bound - {"StartApp", "SidePanes"}) == len(shown)


WORDS: dict[str, tuple[Look, Any]] = {
    f"cast {MLP} f16": (rules, [f"{MLP}=float16"]),
    "filter up_proj": (cursor, "model.layers.0.mlp.up_proj"),
    f"go {MLP}": (cursor, MLP),
    "sort bytes": (lambda app: app.query_one(ModuleTree).order, "bytes"),
    "columns bytes": (lambda app: app.query_one(ModuleTree).hidden, {"params", "drift"}),
    "theme high-contrast": (lambda app: app.theme, "high-contrast"),
    "export out": (lambda app: engine(app).wishes[-1:], [ExportWish(Path("out"))]),
    "recipe r.yaml": (lambda app: engine(app).wishes[-1:], [RecipeWish(Path("r.yaml"))]),
    "report r.md": (lambda app: engine(app).wishes[-1:], [ReportWish(Path("r.md"))]),
    "preset all-bf16": (rules, ["*=bfloat16"]),
    "inputs import os": (lambda app: engine(app).lines, ["import os"]),
}


async def test_every_command_with_words_does_something() -> None:
    assert [line.split()[0] for line in WORDS] == [command.name for command in WITH_ARGUMENTS]
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await ready(app, pilot)
        for line, (look, seen) in WORDS.items():
            assert look(app) != seen, f"before {line}"
            await enter(app, pilot, line)
            await wait(app, pilot, look, seen)
            assert look(app) == seen, (line, notices(app))


async def test_what_the_palette_has_beside_the_keys_works() -> None:
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await ready(app, pilot)
        keys = {binding.description for binding in app.BINDINGS if isinstance(binding, Binding)}
        more = {command.title: command for command in app.get_system_commands(app.screen) if command.title not in keys}
        assert set(more) == {"Theme", "Keys", "Maximize", "Screenshot"}
        for name, look, seen in (
            ("Maximize", lambda app: app.screen.maximized is not None, True),
            ("Theme", top, "CommandPalette"),
            ("Keys", lambda app: len(app.screen.query("HelpPanel")), 1),
            ("Screenshot", lambda app: len(list(Path().glob("*.svg"))), 1),
        ):
            assert look(app) != seen
            more[name].callback()
            await wait(app, pilot, look, seen)
            assert look(app) == seen, name
            await pilot.press("escape")


MORE_SCENES: dict[str, Scene] = {
    "map": told(ready, scanned, "s", "m"),
    "all dtypes": told(ready, scanned, "s", "a"),
    "compare": after(SCENES["history"], "c", "j", "c"),
    "limits": told(ready, scanned, "o", "slash"),
    "many inputs": told(ready, many_inputs, "i"),
    "many causes": told(after(mixed, "d"), many_causes),
    "palette": after(ready, "ctrl+p"),
    "paths": after(ready, "colon", *"export "),
}


def overflowing(app: DtypeApp) -> Iterator[str]:
    """What does not fit: widgets that reach beyond the screen or their box, lines and titles that are cut."""
    for widget in app.screen.walk_children(Widget):
        if not widget.display or not widget.region:
            continue
        name = f"{type(widget).__name__} #{widget.id}"
        scrolls = any(isinstance(above, ScrollableContainer) for above in widget.ancestors)
        if not scrolls and not app.screen.region.contains_region(widget.region):
            yield f"{name} reaches beyond the screen: {widget.region}"
        if isinstance(widget, VerticalScroll) and widget.max_scroll_x and not app.screen.has_class("map"):
            yield f"{name} is {widget.max_scroll_x} cells too wide"
        for words in (widget.border_title, widget.border_subtitle):
            if words and cell_len(str(words)) > widget.region.width - 4:
                yield f"{name}: {words!r} is cut"
        words = widget.content if isinstance(widget, Static) and widget.region.height == 1 else None
        if isinstance(words, Text) and words.cell_len > widget.region.width:
            yield f"{name}: {words.plain!r} is cut"


@pytest.mark.parametrize("name", [*SCENES, *MORE_SCENES])
async def test_every_screen_fits_80_x_24(name: str) -> None:
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await (SCENES | MORE_SCENES)[name](app, pilot)
        await pilot.pause()
        assert list(overflowing(app)) == []
        assert all(cell_len(line) <= SMALL[0] for line in lines(app))
