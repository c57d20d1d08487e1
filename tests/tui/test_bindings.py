"""The keys that the help names, pressed; the same actions from the palette and the command line.

Before a key, what it is to bring about must not be there yet, so one that does nothing fails.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.observations import MLP, Look, cursor, rules, top, wait
from tests.helpers.recording_engine import engine, make_app
from tests.helpers.scenes import ready
from tests.helpers.screen_text import notices
from tests.helpers.walks import IN_MAIN, MAIN, OTHER_PLACES, Key, Walk
from textual.binding import Binding
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot
from textual.widgets import Input

import dtype_tui
from dtype_engine.service.save_requests import ExportRequest, RecipeRequest, ReportRequest
from dtype_tui.app import DtypeApp
from dtype_tui.config.bindings import KEYS
from dtype_tui.config.key_groups import GROUPS
from dtype_tui.config.key_names import name_of, on_keyboard
from dtype_tui.config.questions import questions_without_keys
from dtype_tui.screens.help import sections
from dtype_tui.state.commands import DOWNLOAD, WITH_ARGUMENTS
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ModuleTree

SMALL = (80, 24)
(CHECK,) = (question.meaning for question in questions_without_keys())
ACTIVATIONS = next(command.meaning for command in WITH_ARGUMENTS if command.name == "activations")
WITHOUT = {CHECK, DOWNLOAD, ACTIVATIONS}
"""What neither a key runs nor a command with arguments."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files are written to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DOWNLOAD_DIR", str(tmp_path))


Way = Callable[[DtypeApp, "Pilot[None]", str], Awaitable[None]]


async def by_key(app: DtypeApp, pilot: Pilot[None], key: str) -> None:
    await pilot.press(key)


async def by_palette(app: DtypeApp, pilot: Pilot[None], key: str) -> None:
    """Run the entry of the command palette that has the description of the key."""
    binding = of_the_app(key)
    (found,) = (command for command in app.get_system_commands(app.screen) if command.title == binding.description)
    found.callback()


async def by_command(app: DtypeApp, pilot: Pilot[None], key: str) -> None:
    """Type the `:` command of the key's action."""
    name = name_of(of_the_app(key).action)
    await enter(app, pilot, name)


async def enter(app: DtypeApp, pilot: Pilot[None], line: str) -> None:
    await pilot.press("colon")
    app.query_one(CommandLine).query_one(Input).value = line
    await pilot.pause()
    await pilot.press("enter")


def of_the_app(key: str) -> Binding:
    (found,) = (binding for binding in KEYS if isinstance(binding, Binding) and binding.key == key)
    return found


async def take(walk: Walk, way: Way = by_key, only: Callable[[str], bool] = lambda key: True) -> None:
    """Press the keys of a walk. way: how to do what a key does, for keys that `only` selects; the others are pressed."""
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


@pytest.mark.slow
@pytest.mark.parametrize("walk", [*IN_MAIN, *OTHER_PLACES], ids=named)
async def test_every_key_does_what_the_help_says(walk: Walk) -> None:
    await take(walk)


def by_no_palette(key: str) -> bool:
    return of_the_app(key).action == "app.command_palette"


def by_no_command(key: str) -> bool:
    action = of_the_app(key).action
    return ("(" in action and not action.startswith("ask(")) or action in ("command", "filter", "cast")


@pytest.mark.slow
@pytest.mark.parametrize("walk", IN_MAIN, ids=named)
async def test_command_palette_does_the_same_as_the_keys(walk: Walk) -> None:
    await take(walk, by_palette, lambda key: not by_no_palette(key))


@pytest.mark.slow
@pytest.mark.parametrize("walk", IN_MAIN, ids=named)
async def test_commands_do_the_same_as_the_keys(walk: Walk) -> None:
    await take(walk, by_command, lambda key: not by_no_command(key))


async def test_ctrl_z_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, the signal is only received; in tests/terminal, a real process stops and continues."""
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


def test_every_key_in_the_help_is_tested() -> None:
    shown, _ = sections({}, ())
    named_by_the_help = {
        (place, key)
        for place, rows in shown
        for keys, _ in rows
        for key in (map(str, range(1, 9)) if keys == "1 to 8" else keys.split(", "))
    }
    walked = {
        (walk.place, on_keyboard(step.key))
        for walk in (*IN_MAIN, *OTHER_PLACES)
        for step in walk.steps
        if isinstance(step, Key)
    }
    assert named_by_the_help == walked | {(MAIN, "Ctrl+z"), (MAIN, "Ctrl+l")}
    assert all(what for _, rows in shown for _, what in rows)


def test_every_class_with_keys_has_a_section_in_the_help() -> None:
    """Each class that binds keys of its own, but for the screen to choose a model in, what leads to the tree's, and the line to
    type in, whose keys are those of every line; the keys of the app stand with those of the main screen.
    """
    bound = {
        found.__name__
        for module in pkgutil.walk_packages(dtype_tui.__path__, "dtype_tui.")
        if module.name != "dtype_tui.__main__"
        for found in vars(importlib.import_module(module.name)).values()
        if isinstance(found, type) and found.__module__.startswith("dtype_tui") and "BINDINGS" in vars(found)
    }
    shown, _ = sections({}, ())
    assert len(bound - {"ModelPicker", "SidePanes", "DtypeApp", "LineInput"}) == len(shown)


def test_every_main_screen_key_is_in_one_help_group() -> None:
    """Excepted are the keys 1 to 8, which have a line of their own."""
    bound = [binding.id for binding in (*KEYS, *ModuleTree.BINDINGS) if isinstance(binding, Binding)]
    grouped = [name for entries in GROUPS.values() for _, names in entries for name in names]
    assert sorted(grouped) == sorted(name for name in bound if name and not name.startswith("cast-node-"))


WORDS: dict[str, tuple[Look, Any]] = {
    f"cast {MLP} f16": (rules, [f"{MLP}=float16"]),
    "filter up_proj": (cursor, "model.layers.0.mlp.up_proj"),
    f"go {MLP}": (cursor, MLP),
    "sort bytes": (lambda app: app.query_one(ModuleTree).order, "bytes"),
    "context 300 2": (lambda app: (app.controller.experiment.tokens, app.controller.experiment.served.batch), (300, 2)),
    "budget 2GiB": (lambda app: app.controller.experiment.served.budget, 2 << 30),
    "columns bytes": (lambda app: app.query_one(ModuleTree).hidden, {"params", "drift"}),
    "theme high-contrast": (lambda app: app.theme, "high-contrast"),
    "export out": (lambda app: engine(app).saves[-1:], [ExportRequest(Path("out"))]),
    "recipe r.yaml": (lambda app: engine(app).saves[-1:], [RecipeRequest(Path("r.yaml"))]),
    "report r.md": (lambda app: engine(app).saves[-1:], [ReportRequest(Path("r.md"))]),
    "preset all-bf16": (rules, ["*=bfloat16"]),
    "activations": (lambda app: engine(app).commands[-1:], ["activations"]),
    "download": (lambda app: engine(app).commands[-1:], ["download"]),
    "inputs import os": (lambda app: engine(app).lines, ["import os"]),
    "help perplexity": (top, "HelpScreen"),
}


@pytest.mark.slow
async def test_every_command_with_arguments_works() -> None:
    assert [line.split()[0] for line in WORDS] == [command.name for command in WITH_ARGUMENTS]
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await ready(app, pilot)
        for line, (look, seen) in WORDS.items():
            assert look(app) != seen, f"before {line}"
            await enter(app, pilot, line)
            await wait(app, pilot, look, seen)
            assert look(app) == seen, (line, notices(app))


@pytest.mark.slow
async def test_entries_of_the_command_palette_without_keys_work() -> None:
    app = make_app()
    async with app.run_test(size=SMALL) as pilot:
        await ready(app, pilot)
        keys = {binding.description for binding in KEYS if isinstance(binding, Binding)}
        more = {command.title: command for command in app.get_system_commands(app.screen) if command.title not in keys}
        typed = [command for command in WITH_ARGUMENTS if command.meaning in more and command.arguments]
        assert {*more} - {command.meaning for command in typed} == {"Theme", "Maximize", "Screenshot", *WITHOUT}
        for command in typed:
            more[command.meaning].callback()
            await pilot.pause()
            assert app.query_one(CommandLine).query_one(Input).value == f"{command.name} "
            await pilot.press("escape")
        for name, look, seen in (
            ("Maximize", lambda app: app.screen.maximized is not None, True),
            ("Theme", top, "CommandPalette"),
            (CHECK, lambda app: engine(app).commands[-1:], ["check"]),
            (ACTIVATIONS, lambda app: engine(app).commands[-1:], ["activations"]),
            (DOWNLOAD, lambda app: engine(app).commands[-1:], ["download"]),
            ("Screenshot", lambda app: len(list(Path().glob("*.svg"))), 1),
        ):
            assert look(app) != seen
            more[name].callback()
            await wait(app, pilot, look, seen)
            assert look(app) == seen, name
            await pilot.press("escape")
