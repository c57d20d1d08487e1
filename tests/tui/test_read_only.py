"""A read-only session: every key and command is known to be harmless, or refused in a sentence, and shown nowhere."""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path

import pytest
from tests.helpers.recording_engine import engine, launched
from tests.helpers.scenes import ready
from tests.helpers.screen_text import notices, screen
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widgets import Input

import dtype_tui
from dtype_engine.service.commands import READ_ONLY
from dtype_tui.app import DtypeApp
from dtype_tui.config.bindings import HIDDEN, KEYS
from dtype_tui.config.key_names import name_of
from dtype_tui.config.questions import questions_without_keys
from dtype_tui.screens.help import key_blocks, sections
from dtype_tui.state import commands as state
from dtype_tui.state.commands import WITH_ARGUMENTS, all_commands
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ModuleTree

HARMLESS_KEYS = """
    cast cast-node-float32 cast-node-bfloat16 cast-node-float16 cast-node-float64 cast-node-float8-e4m3fn
    cast-node-float8-e5m2 cast-node-int8 cast-node-stored undo redo drop-rules measure causes remedy history flow generate
    speed executions scan optimise presets inputs settings values worst filter match-next match-previous command next-order
    copy-name copy-rules fold jump rules zoom details stop jobs over-memory restart-engine help command-palette messages quit
    repaint move-previous move-next open close open-or-close next-pane page-previous page-next end-previous end-next
    sibling-next sibling-previous parent next-cast-next next-cast-previous expand-all collapse-all
"""
REFUSED_KEYS = {"leave-with": "e", "suspend-process": "ctrl+z", "tour": "ctrl+t"}
HARMLESS_COMMANDS = {
    "cast": "*.mlp bf16", "filter": "mlp", "go": "model", "sort": "bytes", "columns": "bytes", "context": "8192 2",
    "budget": "24GiB", "theme": "high-contrast", "preset": "all-bf16", "check": "", "activations": "", "inputs": "",
    "help": "kl",
}  # fmt: skip
"""Commands of the `:` line without a key, with arguments that a read-only session takes."""
WRITING = {"export", "recipe", "report", "download"}
REFUSED_COMMANDS = ("export out", "recipe r.yaml", "report r.md", "inputs import os", "inputs /etc/passwd", "download")
HARMLESS_WINDOWS = {
    "CastPrompt": "cancel generalise",
    "CausesScreen": "close_and_stop go leave move page put_back undo",
    "CommandLine": "cancel complete earlier",
    "FilterPrompt": "cancel",
    "GenerationScreen": "leave other_line other_view scroll",
    "HelpScreen": "dismiss leave scroll search",
    "InputsScreen": "dismiss scroll",
    "JobsScreen": "leave move stop",
    "JumpScreen": "leave",
    "LineInput": "cursor_left_word cursor_right_word delete_left_word delete_right_word",
    "MeasurementsScreen": "axis compare compare_all go_back leave measure move pin",
    "OptimiseScreen": "apply compare end leave loader measure scroll type undo walk zoom",
    "Overlay": "dismiss edge scroll",
    "Pane": "screen.next_pane screen.to_tree step",
    "PicturesScreen": "leave move",
    "PresetsScreen": "apply leave move rounding",
    "RecipePane": "cast delete move screen.edit_rule switch",
    "ScanScreen": "again all dtype go leave map move pause sort",
    "ScanSetup": "choose leave loader move start",
    "SettingsScreen": "apply change leave move",
    "WeightScreen": "gains",
}
"""The actions of the keys of each window and prompt. The lines to type in are the prompts, and searches in what is shown."""
UNREACHED_WINDOWS = {"SaveScreen": "leave-with refuses", "ModelPicker": "a read-only session needs a MODEL"}


def of_keys() -> list[Binding]:
    return [binding for binding in (*KEYS, *ModuleTree.BINDINGS) if isinstance(binding, Binding)]


def test_every_key_and_command_is_classified_as_allowed_or_refused_when_read_only() -> None:
    """A new key or command fails this test until somebody has decided whether a viewer may use it to read or write files."""
    assert {binding.id for binding in of_keys()} == {*HARMLESS_KEYS.split(), *REFUSED_KEYS}
    refused = {line.split()[0] for line in REFUSED_COMMANDS}
    without_keys = (question.job for question in questions_without_keys())
    assert {*(command.name for command in WITH_ARGUMENTS), *without_keys} == {*HARMLESS_COMMANDS, *refused}
    bound = {
        found.__name__: " ".join(sorted({binding.action.partition("(")[0] for binding in vars(found)["BINDINGS"]}))
        for module in pkgutil.walk_packages(dtype_tui.__path__, "dtype_tui.")
        if module.name != "dtype_tui.__main__"
        for found in vars(importlib.import_module(module.name)).values()
        if isinstance(found, type) and found.__module__.startswith("dtype_tui") and "BINDINGS" in vars(found)
    }
    of_windows = {name: actions for name, actions in bound.items() if name in HARMLESS_WINDOWS}
    assert of_windows == HARMLESS_WINDOWS
    assert bound.keys() - of_windows == {"DtypeApp", "MainScreen", "ModuleTree", *UNREACHED_WINDOWS}


def test_keys_and_commands_classified_as_refused_are_refused_when_read_only() -> None:
    assert set(REFUSED_KEYS) == HIDDEN
    commands = all_commands(state.of_keys(of_keys(), {}))
    for line in REFUSED_COMMANDS:
        name, _, rest = line.partition(" ")
        assert commands[name].is_refused((rest,)), line
    for name, rest in HARMLESS_COMMANDS.items():
        assert not commands[name].is_refused(tuple(rest.split())), name
    assert {name for name, command in commands.items() if command.is_refused(())} == HIDDEN | {"download"}


async def enter(app: DtypeApp, pilot: Pilot[None], line: str) -> None:
    await pilot.press("colon")
    app.query_one(CommandLine).query_one(Input).value = line
    await pilot.press("enter")
    await pilot.pause()


@pytest.mark.slow
async def test_keys_refused_when_read_only_give_one_sentence_and_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried are the keys, their commands and the screenshot. None reaches the engine or the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DOWNLOAD_DIR", str(tmp_path))
    async with launched(read_only=True, size=(80, 24)) as (app, pilot):
        await ready(app, pilot)
        before = list(engine(app).commands)
        for number, refused in enumerate(
            (*REFUSED_KEYS.values(), *(f":{line}" for line in (*REFUSED_COMMANDS, *REFUSED_KEYS)))
        ):
            if refused.startswith(":"):
                await enter(app, pilot, refused[1:])
            else:
                await pilot.press(refused)
            await pilot.pause()
            assert notices(app) == [READ_ONLY] * (number + 1), refused
            assert len(app.screen_stack) == 1
        assert READ_ONLY in screen(app)
        assert app.deliver_screenshot() is None
        assert engine(app).commands == before
        assert (engine(app).saves, engine(app).lines, app.guide.tour) == ([], [], None)
        await pilot.press("2")
        assert [str(rule) for rule in app.controller.experiment.recipe.rules] == ["*=bfloat16"]
        await pilot.press("i")
        await pilot.pause()
        assert "Inputs" in screen(app)
        assert not app.screen.query(Input), "there is no line for other inputs"
    assert list(tmp_path.iterdir()) == []


async def test_keys_refused_when_read_only_are_not_shown() -> None:
    async with launched(read_only=True, size=(120, 36)) as (app, pilot):
        await ready(app, pilot)
        hidden = {binding.description for binding in of_keys() if binding.id in HIDDEN}
        assert len(hidden) == 3
        palette = {command.title for command in app.get_system_commands(app.screen)}
        assert not palette & (hidden | {"Screenshot"})
        panel = {active.binding.description for active in app.screen.active_bindings.values()}
        assert "Cast by pattern" in panel
        assert not panel & hidden
        completer = app.main._words.completer({})
        offered = set(completer(""))
        assert offered == {name_of(name) for name in completer.commands} - HIDDEN - WRITING
        for line in ("export /", "inputs /", "report ~/", "recipe "):
            assert completer(line) == []
        await pilot.press("question_mark")
        await pilot.pause()
        assert "inputs of the model" in screen(app)
        for words in ("write a checkpoint", "the tour", "suspend"):
            assert words not in screen(app)
    shown, _ = sections({}, (), HIDDEN)
    assert "In the save window" not in {title for title, _ in shown}
    lines = [line.plain for block in key_blocks({}, HIDDEN) for line in block]
    assert not [line for line in lines if "^z" in line or "^t" in line]


async def test_read_only_scan_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for read_only in (True, False):
        async with launched(read_only=read_only) as (app, pilot):
            await ready(app, pilot)
            monkeypatch.setattr(engine(app), "request", asked.append)
            app.controller.start_scan(("int8",))
    assert [scan.keep for scan in asked] == [False, True]  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [["--read-only"], ["--read-only", "tour"]])
def test_read_only_app_refuses_to_start_without_a_named_model(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from dtype_engine.cli.program import run
    from dtype_tui.cli.command import command

    os.environ.pop("TEXTUAL_DRIVER", None)
    assert run(command, "dtype-tui", arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("dtype-tui: --read-only: ")
    assert said.count("\n") == 1
