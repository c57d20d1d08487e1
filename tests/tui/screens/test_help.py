"""The help: every key of the main screen on a page, and a search."""

from __future__ import annotations

import pytest
from tests.helpers.recording_engine import launched
from tests.helpers.scenes import mixed, ready
from tests.helpers.screen_text import lines, missing, screen
from textual.binding import Binding
from textual.containers import VerticalScroll

from dtype_tui.config.bindings import KEYS
from dtype_tui.config.config import Config
from dtype_tui.config.key_groups import GROUPS
from dtype_tui.screens.help import HelpScreen, search, sections
from dtype_tui.widgets.module_tree import ModuleTree


@pytest.mark.slow
@pytest.mark.parametrize(("size", "pages"), [((120, 36), 1), ((80, 24), 2)])
async def test_help_shows_all_keys_of_the_main_screen_uncut(size: tuple[int, int], pages: int) -> None:
    async with launched(size=size) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("question_mark")
        await pilot.pause()
        shown = ""
        for _ in range(pages):
            shown += screen(app)
            await pilot.press("pagedown")
            await pilot.pause()
        for title, entries in GROUPS.items():
            assert title in shown
            for words, _ in entries:
                assert words in shown, f"{words} is cut or not there"
        assert "1 f32  2 bf16  3 f16  4 f64  5 fp8  6 fp8e5  7 i8  8 as stored" in shown
        assert app.screen.query_one(VerticalScroll).max_scroll_y > 0, "windows and words come below"


@pytest.mark.slow
async def test_help_shows_keys_for_the_current_node_first() -> None:
    async with launched() as (app, pilot):
        await mixed(app, pilot)
        app.query_one(ModuleTree).go_to("model.layers.4.mlp")
        await pilot.press("question_mark")
        await pilot.pause()
        assert "Here: model.layers.4.mlp" in lines(app)[2]
        assert "values" not in lines(app)[4]
        await pilot.press("escape")
        app.query_one(ModuleTree).go_to("model.embed_tokens.weight")
        await pilot.press("3", "question_mark")
        await pilot.pause()
        assert "Here: model.embed_tokens.weight" in lines(app)[2]
        assert "v its values" in lines(app)[4]
        assert "x drop its rules" in lines(app)[4]


@pytest.mark.slow
@pytest.mark.parametrize("searched", [False, True])
async def test_multiline_help_texts_are_aligned(searched: bool) -> None:
    async with launched(size=(80, 24)) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("question_mark", *(["slash", *"baseline", "enter"] if searched else []))
        await pilot.pause()
        for _ in range(20):
            first = next((place for place, line in enumerate(lines(app)) if "recipe the baseline" in line), None)
            if first is not None and first < 18:
                break
            await pilot.press(*["pagedown"] if first is None else ["j"] * 9)
            await pilot.pause()
        assert first is not None, screen(app)
        column = lines(app)[first].index("make the recipe")
        more = lines(app)[first + 1].strip("│ ").split()
        assert lines(app)[first + 1].index(more[0]) == column, screen(app)
        assert lines(app)[first + 1][1:column].strip() == ""


def test_help_lists_no_description_of_a_window_twice() -> None:
    places = dict(sections({}, ())[0])
    for title, rows in places.items():
        descriptions = [words for _, words in rows]
        assert len(descriptions) == len(set(descriptions)), title
    assert ("1 to 8", "the rule's dtype") in [row for rows in places.values() for row in rows]


def test_help_wrapped_into_lines_contains_all_words() -> None:
    for title, rows in sections({}, ())[0]:
        found = search([(title, rows)], (), title, 40).plain
        assert all(len(line) <= 40 for line in found.splitlines())
        for _, words in rows:
            assert " ".join(words.split()) in " ".join(found.split())


@pytest.mark.slow
async def test_help_search_finds_keys_of_every_window() -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        await pilot.press("question_mark", "slash", *"zoom")
        await pilot.pause()
        assert not missing(app, "Along the front", "zoom in around the point")
        assert "a line up, down" not in screen(app)
        await pilot.press("escape", "slash", *"q4_k_m")
        await pilot.pause()
        assert "0.031" in screen(app), "the limits of the words, with their source"
        await pilot.press("escape", "slash", *"xyzzy")
        await pilot.pause()
        assert "Nothing in the help contains 'xyzzy'." in screen(app)


def test_help_search_finds_every_key_by_its_description() -> None:
    places, _ = sections({}, ())
    for binding in (*KEYS, *ModuleTree.BINDINGS):
        assert isinstance(binding, Binding)
        found = search(places, (), binding.description, 200).plain
        assert binding.description[1:] in found


async def test_help_search_finds_every_text_of_the_help() -> None:
    async with launched() as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        help_screen = app.screen
        assert isinstance(help_screen, HelpScreen)
        described = [words for entries in GROUPS.values() for words, _ in entries]
        for words in (*described, "worst", "copy its name"):
            found = search(help_screen._searched(), help_screen._words, words, 200).plain
            assert words in found, words
        await pilot.press("slash", *"worst")
        await pilot.pause()
        assert "the worst module" in screen(app)


def test_descriptions_in_the_help_begin_with_lower_case_letters() -> None:
    begun = {words[0] for _, rows in sections({}, ())[0] for _, words in rows}
    assert begun == {letter.lower() for letter in begun}


@pytest.mark.slow
async def test_remapped_keys_are_shown_in_the_help() -> None:
    async with launched(config=Config(keys={"measure": "f5"})) as (app, pilot):
        await ready(app, pilot)
        await pilot.press("question_mark")
        await pilot.pause()
        assert any("f5" in line and "measure again" in line for line in lines(app))
