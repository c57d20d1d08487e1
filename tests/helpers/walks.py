"""Every key in the help, by place, with its effect. A walk opens a place and presses its keys one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.helpers.observations import (
    MLP,
    Look,
    at,
    bottom,
    cast,
    chosen,
    cursor,
    focus,
    half_scanned,
    last_command,
    last_rule,
    line,
    many_causes,
    many_inputs,
    marked_line,
    much_said,
    not_finite,
    on_page,
    opened,
    pane,
    point,
    press,
    row,
    rules,
    scrolled,
    title,
    top,
    typed,
    typing,
    wait_after,
)  # fmt: skip
from tests.helpers.recording_engine import engine
from tests.helpers.scenes import SCENES, Scene, after, measuring, mixed, queued, ready, scanned, with_event
from textual.containers import VerticalScroll
from textual.widgets import DataTable

from dtype_engine.recipe.presets import PRESETS
from dtype_tui.config.bindings import DIGITS
from dtype_tui.widgets.module_tree import ModuleTree


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
            Key("H", top, "MeasurementsScreen"),
            back,
            Key("p", top, "PresetsScreen"),
            back,
            Key("e", top, "SaveScreen"),
            back,
            Key("i", top, "InputsScreen"),
            back,
            Key("comma", top, "SettingsScreen"),
            back,
            Key("question_mark", top, "HelpScreen"),
            back,
            Key("M", title, "Messages"),
            back,
            Key("J", top, "JobsScreen"),
            back,
            Key("ctrl+p", top, "CommandPalette"),
            back,
            Key("ctrl+t", lambda app: app.guide.tour is not None, True),
            press("ctrl+t"),
            Key("enter", title, "down_proj"),
            back,
            Key("f", last_command, "flow"),
            Key("g", last_command, "generate 48"),
            Key("t", last_command, "speed"),
            Key("m", last_command, "measure"),
        ),
    ),
    Walk(
        MAIN,
        at("model.embed_tokens.weight"),
        (
            Key("v", last_command, "look at model.embed_tokens.weight"),
            Key("s", top, "ScanSetup"),
            back,
            with_event(press(), scanned),
            Key("o", top, "OptimiseScreen"),
        ),
    ),
    Walk(
        MAIN,
        with_event(cast(MLP), not_finite),
        (press("3"), with_event(press(), not_finite), Key("a", last_rule, f"{MLP}=bfloat16")),
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
    Walk(MAIN, measuring, (Key("escape", last_command, "cancel"),)),
    Walk(MAIN, measuring, (Key("R", last_command, "restart"),)),
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
            Key("up", chosen, "classes"),
            Key("k", chosen, "storage-only"),
            Key("shift+tab", chosen, "activations"),
            Key("down", chosen, "storage-only"),
            Key("j", chosen, "classes"),
            Key("tab", chosen, "autocast"),
            Key("right", marked_line, "▌ autocast off [bf16] f16"),
            Key("l", marked_line, "▌ autocast off bf16 [f16]"),
            Key("space", marked_line, "▌ autocast [off] bf16 f16"),
            Key("left", marked_line, "▌ autocast off bf16 [f16]"),
            Key("h", marked_line, "▌ autocast off [bf16] f16"),
            Key("enter", lambda app: [settings.autocast for settings in engine(app).settings], ["bfloat16"]),
            press("comma"),
            Key("escape", top, "MainScreen"),
            press("comma"),
            Key("q", top, "MainScreen"),
        ),
    ),
    Walk(
        "In the inputs",
        with_event(ready, many_inputs, "i"),
        (
            Key("down", scrolled, 1),
            Key("pagedown", scrolled, 9),
            Key("up", scrolled, 8),
            Key("pageup", scrolled, 0),
            Key("escape", top, "MainScreen"),
        ),
    ),
    Walk(
        "In the dtypes to scan",
        after(ready, "s"),
        (
            Key("up", marked_line, "▌ [ ] i4@128 int4@g128"),
            Key("k", marked_line, "▌ [ ] nvfp4 nvfp4"),
            Key("down", marked_line, "▌ [ ] i4@128 int4@g128"),
            Key("j", marked_line, "▌ [x] bf16 bfloat16"),
            Key("space", marked_line, "▌ [ ] bf16 bfloat16"),
            Key("escape", top, "MainScreen"),
            press("s"),
            Key("q", top, "MainScreen"),
            press("s", "space"),
            Key("enter", last_command, "scan float16,float8_e4m3fn,float8_e5m2,int8"),
        ),
    ),
    Walk(
        "In the scan",
        with_event(ready, scanned, "s"),
        (
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
            Key("escape", top, "MainScreen"),
            press("s"),
            Key("q", top, "MainScreen"),
            press("s"),
            Key("s", top, "ScanSetup"),
            press("escape", "s"),
            Key("enter", top, "MainScreen"),
        ),
    ),
    Walk(
        "In the scan", with_event(after(ready, "s", "enter"), half_scanned, "s"), (Key("space", last_command, "pause"),)
    ),
    Walk(
        "Along the front",
        with_event(ready, scanned, "o"),
        (
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
            Key("slash", typing, True),
            Key("escape", typing, False),
            Key("colon", typing, True),
            back,
            Key("i", typing, True),
            back,
            Key("escape", top, "MainScreen"),
            press("o"),
            Key("q", top, "MainScreen"),
        ),
    ),
    Walk(
        "In drift over depth",
        with_event(after(mixed, "d"), many_causes),
        (
            wait_after(on_page(lambda page: page.query_one(VerticalScroll).max_scroll_y > 0)),
            Key("j", scrolled, 1),
            Key("k", scrolled, 0),
            Key("escape", top, "MainScreen"),
            press("d"),
            Key("q", top, "MainScreen"),
            press("d"),
            Key("d", top, "MainScreen"),
        ),
    ),
    Walk(
        "In the history",
        SCENES["history"],
        (
            Key(
                "p",
                lambda app: [entry.pinned for entry in app.controller.experiment.measured],
                [False, False, False, True],
            ),
            Key("j", row, 1),
            Key("k", row, 0),
            Key("m", last_command, "recipes"),
            Key("P", lambda app: app.controller.experiment.baseline is not None, True),
            press("P"),
            Key("c", on_page(lambda page: str(page.query_one(DataTable).get_cell_at((0, 0)))), "4*c"),
            press("j"),
            Key("c", title, "Two recipes side by side"),
            back,
            Key("enter", rules, ["*=float16"]),
            press("H"),
            Key("escape", top, "MainScreen"),
            press("H"),
            Key("q", top, "MainScreen"),
            press("H"),
            Key("H", top, "MainScreen"),
        ),
    ),
    Walk(
        "In the presets",
        ready,
        (
            wait_after(on_page(lambda page: len(page.effects) == len(PRESETS)), "p"),
            Key("down", chosen, "fp16-but-norms"),
            Key("j", chosen, "fp8-linears"),
            Key("tab", chosen, "norms-head-fp32"),
            Key("up", chosen, "fp8-linears"),
            Key("k", chosen, "fp16-but-norms"),
            Key("shift+tab", chosen, "all-bf16"),
            Key("enter", rules, ["*=bfloat16"]),
            press("p"),
            Key("escape", top, "MainScreen"),
            press("p"),
            Key("q", top, "MainScreen"),
            press("p"),
            Key("p", top, "MainScreen"),
        ),
    ),
    Walk(
        "In the save window",
        after(ready, "e"),
        (
            Key("down", chosen, "recipe"),
            Key("tab", chosen, "report"),
            Key("up", chosen, "recipe"),
            Key("shift+tab", chosen, "checkpoint"),
            Key("escape", top, "MainScreen"),
            press("e"),
            Key("enter", last_command, "save"),
        ),
    ),
    Walk(
        "In the jobs",
        after(queued, "J"),
        (
            Key("down", marked_line, "▌ next: scan"),
            Key("j", marked_line, "▌ next: writing"),
            Key("up", marked_line, "▌ next: scan"),
            Key("k", chosen, "measuring:"),
            press("down"),
            Key("x", last_command, "cancel scan"),
            press("down"),
            Key("delete", last_command, "cancel write"),
            Key("escape", top, "MainScreen"),
            press("J"),
            Key("q", top, "MainScreen"),
            press("J"),
            Key("enter", top, "MainScreen"),
            press("J"),
            Key("J", top, "MainScreen"),
        ),
    ),
    Walk(
        "In this help",
        after(ready, "question_mark"),
        (
            Key("j", scrolled, 1),
            Key("k", scrolled, 0),
            Key("slash", typing, True),
            press(*"worst"),
            Key("escape", typing, False),
            Key("escape", top, "MainScreen"),
            press("question_mark"),
            Key("q", top, "MainScreen"),
            press("question_mark"),
            Key("enter", top, "MainScreen"),
            press("question_mark"),
            Key("question_mark", top, "MainScreen"),
        ),
    ),
    Walk(
        "In a box of text",
        after(much_said, "M"),
        (
            Key("j", scrolled, 1),
            Key("k", scrolled, 0),
            Key("escape", top, "MainScreen"),
            press("M"),
            Key("q", top, "MainScreen"),
            press("M"),
            Key("enter", top, "MainScreen"),
            press("M"),
            Key("question_mark", top, "MainScreen"),
        ),
    ),
)
