"""The screen that offers models if the command line names none."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.helpers.recording_engine import demo_tree, engine, launched, say
from tests.helpers.screen_text import lines, missing, screen, until
from textual.widgets import Input, OptionList

from dtype_engine.checkpoint.source import locate
from dtype_engine.cli.program import TRACEBACK
from dtype_engine.service import events
from dtype_tui.cli.model_picker import DEMO, ModelPicker, Offer, offer_line
from dtype_tui.config.config import Config

OFFERS = [
    Offer("llama-7b/", "this folder", 13_476_000_000, 1.0),
    Offer("org/\x1b[31mtiny", "Hugging Face cache", None, None),
    DEMO,
]


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 15)])
async def test_model_picker_shows_every_offered_model(size: tuple[int, int]) -> None:
    app = ModelPicker(OFFERS, locate)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        text = screen(app)
        assert not missing(app, "llama-7b/", "12.6 GiB", "days ago", "org/", "demo", "Enter opens")
        assert "\x1b" not in text
        assert all(len(line) <= size[0] for line in lines(app))


async def test_ctrl_c_in_the_model_picker_says_which_key_quits() -> None:
    app = ModelPicker(OFFERS, locate)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert "Esc quits" in screen(app)
        assert "[b]" not in screen(app)


async def test_enter_in_the_model_picker_opens_the_selected_model() -> None:
    app = ModelPicker(OFFERS, lambda model: None)
    async with app.run_test() as pilot:
        await pilot.press("down", "down", "enter")
    assert app.return_value == "demo"


async def test_path_typed_in_the_model_picker_is_opened_or_reported_missing() -> None:
    app = ModelPicker(OFFERS, locate)
    async with app.run_test() as pilot:
        await pilot.press(*"nowhere/x", "enter")
        await pilot.pause()
        await until(pilot, lambda: "nowhere/x: no such folder or file" in screen(app))
        app.query_one(Input).value = "demo"
        await pilot.press("enter")
    assert app.return_value == "demo"


async def test_unexpected_error_of_the_model_picker_is_printed_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(TRACEBACK, raising=False)

    def fail(model: str) -> None:
        raise ZeroDivisionError("no idea")

    app = ModelPicker(OFFERS, fail)
    app.error_console = Console(file=io.StringIO(), width=400)

    async def open_the_first() -> None:
        async with app.run_test() as pilot:
            await pilot.press("enter")
            await pilot.pause()

    with pytest.raises(ZeroDivisionError):
        await open_the_first()
    assert app.return_code == 1
    app._print_error_renderables()
    printed = app.error_console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.startswith("dtype-tui: unexpected ZeroDivisionError: no idea")
    assert printed.count("\n") == 1


async def test_typing_filters_the_models_of_the_model_picker() -> None:
    app = ModelPicker(OFFERS, lambda model: None)
    async with app.run_test() as pilot:
        await pilot.press("down", "down", *"LLA")
        assert app.query_one(OptionList).option_count == 1
        assert app.query_one(OptionList).highlighted == 0
        await pilot.press("escape")
        assert app.query_one(OptionList).option_count == 3
        await pilot.press(*"emo", "enter")
    assert app.return_value == "demo"


async def test_existing_path_typed_in_the_model_picker_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    app = ModelPicker(OFFERS, lambda model: None)
    async with app.run_test() as pilot:
        await pilot.press(*"llama")
        assert app.query_one(OptionList).option_count == 2
        await pilot.press("enter")
    assert app.return_value == "llama"


async def test_cursor_keys_and_esc_work_in_the_model_picker() -> None:
    app = ModelPicker(OFFERS, locate)
    async with app.run_test() as pilot:
        await pilot.press("down", "up", "up")
        assert app.query_one(OptionList).highlighted == 2
        await pilot.press("q")
        assert app.query_one(Input).value == "q"
        await pilot.press("escape", "escape")
    assert app.return_value is None


async def test_model_picker_draws_only_ascii_if_configured() -> None:
    app = ModelPicker(OFFERS, locate, Config(ascii="always"))
    async with app.run_test() as pilot:
        await pilot.pause()
        assert screen(app).isascii()


@pytest.mark.parametrize("width", [40, 60, 69, 70, 100, 200])
def test_lines_of_the_model_picker_fit_their_width(width: int) -> None:
    for offer in (*OFFERS, Offer("x" * 300, "this folder", 10**13, 1.0)):
        assert offer_line(offer, width).cell_len <= max(width, 40)


@pytest.mark.parametrize(
    "told",
    [events.ModelReady(demo_tree(), "LlamaForCausalLM", "cpu", 1.0, "prompts", ()), events.OpenFailed("no"), None],
    ids=["loaded", "not loaded", "left before"],
)
async def test_garbage_collection_is_disabled_until_the_model_is_opened(told: events.Event | None) -> None:
    """Then it is enabled, but not for what was loaded by then: a pass over torch and transformers would delay a key."""
    async with launched() as (app, pilot):
        await until(pilot, lambda: engine(app).commands == ["start"])
        assert not gc.isenabled()
        before = gc.get_freeze_count()
        if told is not None:
            await say(app, pilot, told)
            assert gc.isenabled()
            assert gc.get_freeze_count() > before
    assert gc.isenabled()
