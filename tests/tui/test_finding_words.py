"""What the palette and the `:` line find for the words of the screen and of the help."""

from __future__ import annotations

import re

import pytest
from tests.helpers.recording_engine import launched
from tests.helpers.scenes import bring_up, ready
from tests.helpers.screen_text import lines, screen, until
from textual.command import Hit

from dtype_tui.app import DtypeApp, PaletteSearch
from dtype_tui.config.key_groups import GROUPS
from dtype_tui.screens.help import HelpScreen, search
from dtype_tui.widgets.module_tree import ModuleTree

pytestmark = pytest.mark.slow

OF_THE_SCREEN = {
    "export": "export", "save": "leave-with", "write": "leave-with", "worst": "worst", "scan": "scan", "flow": "flow",
    "optimise": "optimise", "front": "optimise", "undo": "undo", "find": "filter", "command": "command", "stop": "stop",
    "details": "details", "help": "help", "quit": "quit", "exit": "quit", "jobs": "jobs", "messages": "messages",
    "history": "history", "presets": "presets", "Drift": "measure", "Memory": "budget", "Recipe": "recipe", "bytes": "columns",
    "SQNR": "columns", "params": "columns", "dtype": "cast", "f16": "cast-node-float16", "quantize": "cast", "prompt": "inputs",
    "sensitivity": "scan", "cancel": "stop", "benchmark": "speed", "implicit casts": "flow", "e": "leave-with", "J": "jobs",
    "w": "worst", "Ctrl+r": "redo", ":export": "export", ":worst": "worst", "3": "cast-node-float16", "?": "help",
}  # fmt: skip

VALUES = {"KiB", "LlamaForCausalLM", "cpu", "embeddings", "norms", "prompts", "Needs", "ready", "worse"}
"""Words on the screen that are no labels: of the model, its inputs and its parts, and within sentences."""


async def hits(app: DtypeApp, query: str) -> list[Hit]:
    found = [hit async for hit in PaletteSearch(app.screen).search(query) if isinstance(hit, Hit)]
    return sorted(found, key=lambda hit: -hit.score)


async def test_words_of_the_screen_find_their_command_first() -> None:
    async with launched(size=(120, 36)) as (app, pilot):
        await ready(app, pilot)
        names = {command.meaning: command.name for command in app.palette_commands()}
        found = {word: names.get((await hits(app, word))[0].text or "") for word in OF_THE_SCREEN}
        assert {word: name for word, name in found.items() if OF_THE_SCREEN[word] != name} == {}


async def test_every_word_of_the_screen_and_the_help_finds_a_command_or_an_explanation() -> None:
    async with launched(size=(180, 50)) as (app, pilot):
        await bring_up("mix", app, pilot)
        names = {part for row in app.query_one(ModuleTree).rows for part in re.findall(r"[A-Za-z]+", row.name)}
        shown = " ".join(lines(app))
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        places, words = app.screen._searched(), app.screen._words
        headings = [
            *GROUPS,
            *(text for entries in GROUPS.values() for text, _ in entries),
            *(title for title, _ in places),
        ]
        lost = set()
        for word in set(re.findall(r"[A-Za-z]{3,}", f"{shown} {' '.join(headings)}")) - names:
            explained = not search(places, words, word, 80).plain.startswith("Nothing")
            if not explained and not any(command.rank(word) for command in app.palette_commands()):
                lost.add(word)
        assert lost <= VALUES


async def test_command_line_finds_commands_by_synonym_and_key() -> None:
    """A name comes first; a letter that begins no name is a key; a word with one meaning runs it."""
    async with launched(size=(80, 24)) as (app, pilot):
        await ready(app, pilot)
        complete = app.main._words.completer(app.main.chosen_keys)
        assert complete("exp") == ["export"]
        assert complete("sav") == ["leave-with"]
        assert complete("J") == ["jobs"]
        assert complete("sensi") == ["scan"]
        await pilot.press("colon", *"sav")
        assert "Save a checkpoint, a recipe, a report" in screen(app)
        await pilot.press("escape", "colon", *"search", "enter")
        await until(pilot, lambda: "did you mean scan or filter" in screen(app))
        await pilot.press("escape", "colon", *"manual", "enter")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)


async def test_help_for_a_word_shows_what_it_says_about_it() -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("colon", *"help cosine", "enter")
        await pilot.pause()
        assert "relative L2, SQNR and cosine" in screen(app)
        await pilot.press("escape", "escape", "ctrl+p", *"cosine")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await pilot.pause(0.2)
        assert "relative L2, SQNR and cosine" in screen(app)
