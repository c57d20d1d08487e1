"""Every key in the help, by place, with its effect. A walk opens a place and presses its keys one after the other. First come what
keys are observed by, and scenes that bring the app to the place of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.helpers.observations import (
    MLP,
    Look,
    at_end,
    chosen,
    cursor,
    many_causes,
    many_inputs,
    marked_line,
    rules,
    scrolled,
    top,
    typed,
    typing,
    wait,
)
from tests.helpers.recording_engine import engine, say
from tests.helpers.scenes import (
    DOWN,
    MIXED,
    SCENES,
    Scene,
    after,
    measuring,
    mixed,
    pictures,
    queued,
    ready,
    scanned,
    values,
    with_event,
)
from tests.helpers.screen_text import lines, screen
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widgets import DataTable

from dtype_engine.recipe.presets import PRESETS
from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.runs import Generation, Written
from dtype_engine.service import events
from dtype_engine.service.jobs import GENERATE, NONFINITE
from dtype_tui.app import DtypeApp
from dtype_tui.config.bindings import DIGITS
from dtype_tui.widgets.module_tree import ModuleTree


def last_command(app: DtypeApp) -> str:
    """The last command that the app sent to the engine."""
    return engine(app).commands[-1]


def line(app: DtypeApp) -> int:
    return app.query_one(ModuleTree).cursor


def opened(app: DtypeApp) -> set[str]:
    """Names in the tree below the node under the cursor."""
    tree = app.query_one(ModuleTree)
    return {row.name for row in tree.rows if row.name.startswith(f"{tree.current.name}.")}


def last_rule(app: DtypeApp) -> str:
    return rules(app)[-1] if rules(app) else ""


def title(app: DtypeApp) -> str:
    boxes = [str(box.border_title) for box in app.screen.query(VerticalScroll) if box.border_title]
    return boxes[0] if boxes else ""


def focus(app: DtypeApp) -> str | None:
    return app.focused.id if app.focused is not None else None


def place(app: DtypeApp) -> int:
    """Index of the marked line in a window of lines to choose from."""
    view: Any = app.screen
    return int(view.index)


def row(app: DtypeApp) -> int:
    return app.screen.query_one(DataTable).cursor_row


def pane(app: DtypeApp) -> str:
    return next(pane.TITLE for pane in app.main.side.panes if pane.display)


def point(app: DtypeApp) -> int:
    """Index of the point of the Pareto front; -1 for the last."""
    view: Any = app.screen
    return -1 if view.index == len(view.front.points) - 1 else view.index


def loader(app: DtypeApp) -> str:
    """The program that is to load the model, in the choice of dtypes to scan."""
    view: Any = app.screen
    return str(view._loader)


def on_page(page: Callable[[Any], Any]) -> Look:
    """Observes the topmost screen."""
    return lambda app: page(app.screen)


def bottom(words: str) -> Look:
    """Observes whether the last line contains these words."""
    return lambda app: words in lines(app)[-1]


def said(words: str) -> Look:
    """Observes whether the screen shows these words."""
    return lambda app: words in "\n".join(lines(app))


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


def not_finite(app: DtypeApp) -> events.Event:
    found = NonFiniteDiagnosis(
        "activation", DOWN, MLP, "mul", "float16", 65504.0, (), 1.1e4, 2.1e5, (f"{MLP}=bfloat16",)
    )
    return events.JobDone(app.controller.experiment.recipe, NONFINITE.ask(None), found)


def half_scanned(app: DtypeApp) -> events.Event:
    found = scanned(app)
    assert isinstance(found, events.ScanUpdated)
    return events.ScanUpdated(found.report, False)


async def much_text(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The window for generated texts, with more lines than it has room for."""
    await ready(app, pilot)
    await pilot.press("g", "f2", "enter")
    lines = tuple(f"line {number}\n" for number in range(80))
    written = Written(tuple(range(80)), lines, 0.5)
    found = Generation("", written, written)
    await say(app, pilot, events.JobDone(app.controller.experiment.recipe, GENERATE.ask(None), (found,)))
    await pilot.pause()


def shown_input(app: DtypeApp) -> str:
    return screen(app).partition(" of the first 2 of 6")[0].rpartition("│ ")[2].strip()


@dataclass(frozen=True)
class Key:
    """A key, and an observation that gives `seen` after the key is pressed, but not before."""

    key: str
    look: Look
    seen: Any


@dataclass(frozen=True)
class Walk:
    """Keys of one place, in order. A Scene among the steps only prepares the next key."""

    place: str
    scene: Scene
    steps: tuple[Key | Scene, ...]


back = press("escape")


def walk(place: str, scene: Scene, *steps: Key | Scene) -> Walk:
    return Walk(place, scene, steps)


def closing(opener: str, *keys: str) -> tuple[Key | Scene, ...]:
    """Close a window by each of `keys`. In between, `opener` opens it again."""
    return tuple(step for key in keys for step in (press(opener), Key(key, top, "MainScreen")))[1:]


def opening(**windows: str) -> tuple[Key | Scene, ...]:
    """Open each of these windows by its key, and close it."""
    return tuple(step for key, window in windows.items() for step in (Key(key, top, window), back))


MIXED_MLP = str(MIXED.rules[-1].pattern)
MAIN = "Casting and measuring"
IN_MAIN = (
    walk(
        MAIN,
        at(MLP),
        # The weights are stored as float32, so 1 and 8 only do something after another cast.
        *(Key(str(number), last_rule, f"{MLP}={DIGITS[number - 1]}") for number in (2, 1, 3, 4, 5, 6, 7, 8)),
        Key("u", last_rule, f"{MLP}=int8"),
        Key("ctrl+r", last_rule, f"{MLP}=stored"),
        Key("x", rules, []),
    ),
    walk(
        MAIN,
        mixed,
        Key("w", cursor, "model.layers.5.mlp.down_proj"),
        Key("z", lambda app: app.query_one(ModuleTree).order, "bytes"),
        Key("F", lambda app: app.query_one(ModuleTree).folds, False),
        press("F"),
        Key("y", lambda app: app.clipboard, "model.layers.5.mlp.down_proj"),
        Key(
            "Y",
            lambda app: app.clipboard,
            "--cast '*=bfloat16' --cast '*norm*=float32' --cast 'model.layers.{4..5}.mlp=float8_e4m3fn'",
        ),
        *opening(d="CausesScreen", H="MeasurementsScreen", p="PresetsScreen", e="SaveScreen", i="InputsScreen"),
        *opening(comma="SettingsScreen", question_mark="HelpScreen", J="JobsScreen", semicolon="JumpScreen"),
        Key("M", title, "Messages"),
        back,
        Key("ctrl+p", top, "CommandPalette"),
        back,
        Key("ctrl+t", lambda app: app.guide.tour is not None, True),
        press("ctrl+t"),
        Key("enter", title, "down_proj"),
        back,
        Key("r", focus, "recipe"),
        back,
        Key("plus", lambda app: app.main.has_class("zoomed"), True),
        press("plus"),
        Key("f", last_command, "flow"),
        Key("g", top, "GenerationScreen"),
        back,
        Key("t", last_command, "speed"),
        Key("b", last_command, "executions"),
        Key("O", last_command, "over-memory"),
        Key("m", last_command, "measure"),
    ),
    walk(
        MAIN,
        at("model.embed_tokens.weight"),
        Key("v", last_command, "look at model.embed_tokens.weight"),
        Key("s", top, "ScanSetup"),
        back,
        with_event(press(), scanned),
        Key("o", top, "OptimiseScreen"),
    ),
    walk(
        MAIN,
        with_event(cast(MLP), not_finite),
        press("3"),
        with_event(press(), not_finite),
        Key("a", last_rule, f"{MLP}=bfloat16"),
    ),
    walk(
        MAIN,
        at(MLP),
        Key("c", typed, f"{MLP}=bf16"),
        back,
        Key("slash", focus, "filter-input"),
        press(*"mlp.up_proj.weight", "enter"),
        Key("n", cursor, "model.layers.4.mlp.up_proj.weight"),
        Key("N", cursor, "model.layers.3.mlp.up_proj.weight"),
        Key("colon", focus, "command-input"),
    ),
    walk(MAIN, measuring, Key("escape", last_command, "cancel")),
    walk(MAIN, measuring, Key("R", last_command, "restart")),
    walk(MAIN, ready, Key("q", lambda app: app._exit, True)),
)
OTHER_PLACES = (
    walk(
        "In the tree",
        at("model.layers.3"),
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
        Key("P", cursor, "model.layers.{0..5}"),
        Key("backspace", cursor, "model.layers"),
        Key("E", lambda app: "model.layers.5.mlp.down_proj.weight" in opened(app), True),
        Key("W", opened, set()),
        Key("tab", pane, "Memory"),
    ),
    walk(
        "In the tree",
        after(ready, "E"),
        Key("pagedown", line, 11),
        Key("ctrl+f", line, 22),
        Key("pageup", line, 11),
        Key("ctrl+b", cursor, ""),
        Key("end", cursor, "model.norm.weight"),
        Key("home", cursor, ""),
        Key("G", cursor, "model.norm.weight"),
        Key("less_than_sign", cursor, ""),
        Key("greater_than_sign", cursor, "model.norm.weight"),
    ),
    walk(
        "In the tree",
        cast("model.layers.2.mlp", cast("model.layers.1", cast("model.layers.4"))),
        Key("right_curly_bracket", cursor, "model.layers.4"),
        Key("left_curly_bracket", cursor, "model.layers.2.mlp"),
    ),
    walk(
        "At the labels",
        after(at("model.layers.3"), "semicolon"),
        Key("escape", top, "MainScreen"),
    ),
    walk(
        "In a pane",
        with_event(ready, long_failure, "plus"),
        Key("down", lambda app: app.main.side.active.first, 1),
        Key("j", lambda app: app.main.side.active.first, 2),
        Key("up", lambda app: app.main.side.active.first, 1),
        Key("k", lambda app: app.main.side.active.first, 0),
        Key("tab", pane, "Memory"),
        Key("escape", focus, "tree"),
    ),
    walk(
        "In the Recipe pane",
        after(mixed, "r"),
        *(Key(str(number), last_rule, f"{MIXED_MLP}={dtype}") for number, dtype in enumerate(DIGITS, 1)),
        Key("K", rules, ["*=bfloat16", f"{MIXED_MLP}=stored", "*norm*=float32"]),
        Key("J", last_rule, f"{MIXED_MLP}=stored"),
        Key("shift+up", rules, ["*=bfloat16", f"{MIXED_MLP}=stored", "*norm*=float32"]),
        Key("shift+down", last_rule, f"{MIXED_MLP}=stored"),
        Key("space", rules, ["*=bfloat16", "*norm*=float32"]),
        Key("enter", typed, f"{MIXED_MLP}=stored"),
        back,
        Key("x", lambda app: len(app.controller.experiment.rules.rows), 2),
        Key("delete", rules, ["*=bfloat16"]),
    ),
    walk(
        "In the cast prompt",
        after(at(MLP), "c"),
        Key("tab", typed, "model.layers.*.mlp=bf16"),
        Key("shift+tab", typed, f"{MLP}=bf16"),
        Key("escape", focus, "tree"),
    ),
    walk(
        "In the filter",
        after(ready, "slash", *"up_proj"),
        Key("escape", lambda app: app.query_one(ModuleTree).filter_text, ""),
    ),
    walk(
        "In the command line",
        after(ready, "colon", *"sort bytes", "enter", "colon"),
        Key("up", typed, "sort bytes"),
        Key("down", typed, ""),
        press(*"go model.layers."),
        Key("tab", typed, "go model.layers.0"),
        press("tab"),
        Key("shift+tab", typed, "go model.layers.0"),
        Key("escape", focus, "tree"),
    ),
    walk(
        "In the settings",
        after(ready, "comma"),
        Key("up", chosen, "tokens"),
        Key("k", chosen, "sequences"),
        Key("shift+tab", chosen, "attention"),
        Key("down", chosen, "sequences"),
        Key("j", chosen, "tokens"),
        Key("tab", chosen, "autocast"),
        Key("right", marked_line, "▌ autocast off [bf16] f16"),
        Key("l", marked_line, "▌ autocast off bf16 [f16]"),
        Key("space", marked_line, "▌ autocast [off] bf16 f16"),
        Key("left", marked_line, "▌ autocast off bf16 [f16]"),
        Key("h", marked_line, "▌ autocast off [bf16] f16"),
        Key("enter", lambda app: [settings.autocast for settings in engine(app).settings], ["bfloat16"]),
        press("comma"),
        *closing("comma", "escape", "q"),
    ),
    walk(
        "In the inputs",
        with_event(ready, many_inputs, "i"),
        Key("down", scrolled, 1),
        Key("pagedown", scrolled, 9),
        Key("up", scrolled, 8),
        Key("pageup", scrolled, 0),
        Key("escape", top, "MainScreen"),
    ),
    walk(
        "In the generated texts",
        much_text,
        Key("down", scrolled, 1),
        Key("pagedown", scrolled, 9),
        Key("up", scrolled, 8),
        Key("pageup", scrolled, 0),
        Key("tab", focus, "generate-tokens"),
        Key("shift+tab", focus, "generate-prompt"),
        Key("f2", last_command, "tokens 48"),
        Key("escape", top, "MainScreen"),
    ),
    walk(
        "In the pictures",
        pictures,
        Key("right", shown_input, "input 2"),
        Key("left", shown_input, "input 1"),
        Key("l", shown_input, "input 2"),
        Key("h", shown_input, "input 1"),
        Key("down", shown_input, "input 2"),
        Key("up", shown_input, "input 1"),
        Key("j", shown_input, "input 2"),
        Key("k", shown_input, "input 1"),
        *(step for key in ("escape", "q", "enter", "g") for step in (Key(key, top, "MainScreen"), press("g"))),
    ),
    walk(
        "In the dtypes to scan",
        after(ready, "s"),
        Key("up", marked_line, "▌ rounded to the nearest values"),
        Key("k", marked_line, "▌ [ ] kv:int4@token kv:int4@token"),
        Key("down", marked_line, "▌ rounded to the nearest values"),
        Key("j", marked_line, "▌ [x] bf16 bfloat16"),
        Key("space", marked_line, "▌ [ ] bf16 bfloat16"),
        Key("right", loader, "vllm"),
        Key("l", loader, "sglang"),
        Key("left", loader, "vllm"),
        Key("h", loader, "transformers"),
        *closing("s", "escape", "q"),
        press("s", "space"),
        Key("enter", last_command, "scan float16,float8_e4m3fn,int8"),
    ),
    walk(
        "In the scan",
        with_event(ready, scanned, "s"),
        Key("right", lambda app: app.controller.experiment.scan.dtype, "float8_e4m3fn"),
        Key("l", lambda app: app.controller.experiment.scan.dtype, "int8"),
        Key("left", lambda app: app.controller.experiment.scan.dtype, "float8_e4m3fn"),
        Key("h", lambda app: app.controller.experiment.scan.dtype, "bfloat16"),
        Key("j", row, 1),
        Key("k", row, 0),
        Key("b", bottom("b by score"), True),
        Key("a", on_page(lambda page: page.query_one(DataTable).row_count), 3 * 56),
        Key("m", bottom("m ranking"), True),
        Key("m", bottom("m map"), True),
        *closing("s", "escape", "q"),
        press("s"),
        Key("s", top, "ScanSetup"),
        press("escape", "s"),
        Key("enter", top, "MainScreen"),
    ),
    walk(
        "In the scan",
        with_event(after(ready, "s", "enter"), half_scanned, "s"),
        Key("space", last_command, "pause"),
    ),
    walk(
        "Along the front",
        with_event(ready, scanned, "o"),
        wait_after(
            on_page(lambda page: page.query_one(VerticalScroll).max_scroll_y > 2), "pageup", "pageup", *["left"] * 4
        ),
        Key("down", scrolled, 1),
        Key("j", scrolled, 2),
        Key("up", scrolled, 1),
        Key("k", scrolled, 0),
        Key("enter", lambda app: app.controller.experiment.recipe == app.screen.recipe, True),  # type: ignore[attr-defined]
        Key("u", rules, []),
        Key("c", title, "Two recipes side by side"),
        back,
        Key("m", last_command, "recipes"),
        Key("plus", on_page(lambda page: page.zoom), 2),
        Key("equals_sign", on_page(lambda page: page.zoom), 4),
        Key("minus", on_page(lambda page: page.zoom), 2),
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
        Key("f", on_page(lambda page: page.front.formats), "transformers"),
        Key("slash", typing, True),
        Key("escape", typing, False),
        Key("colon", typing, True),
        back,
        Key("i", typing, True),
        back,
        *closing("o", "escape", "q"),
    ),
    walk(
        "In drift over depth",
        with_event(after(mixed, "d"), many_causes),
        Key("down", chosen, "model.layers.2.mlp.up_proj"),
        Key("up", chosen, DOWN),
        Key("j", chosen, "model.layers.2.mlp.up_proj"),
        Key("k", chosen, DOWN),
        Key("pagedown", place, 10),
        Key("ctrl+f", place, 20),
        Key("pageup", place, 10),
        Key("ctrl+b", place, 0),
        Key("x", last_rule, f"{DOWN}=float32"),
        Key("u", last_rule, "model.layers.{4..5}.mlp=float8_e4m3fn"),
        press("j"),
        Key("enter", cursor, "model.layers.2.mlp.up_proj"),
        press("d"),
        *closing("d", "escape", "q", "d"),
    ),
    walk(
        "In the history",
        SCENES["history"],
        Key(
            "p",
            lambda app: [entry.pinned for entry in app.controller.experiment.measured],
            [False, False, False, True],
        ),
        Key("j", row, 1),
        Key("k", row, 0),
        Key("m", last_command, "recipes"),
        Key("y", said("no metrics of your own"), True),
        Key("P", lambda app: app.controller.experiment.baseline is not None, True),
        press("P"),
        Key("c", on_page(lambda page: str(page.query_one(DataTable).get_cell_at((0, 0)))), "4*c"),
        press("j"),
        Key("c", title, "Two recipes side by side"),
        back,
        Key("enter", rules, ["*=float16"]),
        press("H"),
        *closing("H", "escape", "q", "H"),
    ),
    walk(
        "In the presets",
        ready,
        wait_after(on_page(lambda page: len(page.effects) == len(PRESETS)), "p"),
        Key("down", chosen, "fp16-but-norms"),
        Key("j", chosen, "fp8-linears"),
        Key("tab", chosen, "norms-head-fp32"),
        Key("up", chosen, "fp8-linears"),
        Key("k", chosen, "fp16-but-norms"),
        Key("shift+tab", chosen, "all-bf16"),
        Key("right", said("fp8-linears:imatrix"), True),
        Key("l", said("fp8-linears:gptq"), True),
        Key("h", said("fp8-linears:imatrix"), True),
        Key("left", said("fp8-linears:imatrix"), False),
        Key("enter", rules, ["*=bfloat16"]),
        press("p"),
        *closing("p", "escape", "q", "p"),
    ),
    walk(
        "In the save window",
        after(ready, "e"),
        Key("down", chosen, "recipe"),
        Key("tab", chosen, "report"),
        Key("up", chosen, "recipe"),
        Key("shift+tab", chosen, "checkpoint"),
        Key("escape", top, "MainScreen"),
        press("e"),
        Key("enter", last_command, "save"),
    ),
    walk(
        "In the jobs",
        after(queued, "J"),
        Key("down", marked_line, "▌ next: scan"),
        Key("j", marked_line, "▌ next: writing"),
        Key("up", marked_line, "▌ next: scan"),
        Key("k", chosen, "measuring:"),
        press("down"),
        Key("x", last_command, "cancel scan"),
        press("down"),
        Key("delete", last_command, "cancel write"),
        *closing("J", "escape", "q", "enter", "J"),
    ),
    walk(
        "In this help",
        after(ready, "question_mark"),
        Key("j", scrolled, 1),
        Key("k", scrolled, 0),
        Key("slash", typing, True),
        press(*"worst"),
        Key("escape", typing, False),
        *closing("question_mark", "escape", "q", "enter", "question_mark"),
    ),
    walk(
        "In the values of a tensor",
        with_event(ready, values),
        Key("r", last_command, "look at model.embed_tokens.weight with gains"),
    ),
    walk(
        "In a box of text",
        after(much_said, "M"),
        Key("j", scrolled, 1),
        Key("k", scrolled, 0),
        Key("G", at_end, True),
        Key("g", scrolled, 0),
        Key("greater_than_sign", at_end, True),
        Key("less_than_sign", scrolled, 0),
        *closing("M", "escape", "q", "enter", "question_mark"),
    ),
)
