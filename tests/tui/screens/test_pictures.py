"""The window with the pictures of both models."""

from __future__ import annotations

import dataclasses

from PIL import ImageColor
from tests.helpers.recording_engine import launched, report, say
from tests.helpers.scenes import ready
from tests.helpers.screen_text import notices, screen
from textual.strip import Strip

from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.pictures import Picture, PicturePair
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.screens.pictures import half_blocks

BF16 = Recipe((Rule("*", "bfloat16"),))


def plain(colour: str, size: tuple[int, int] = (8, 4)) -> Picture:
    return Picture(*size, bytes(ImageColor.getrgb(colour)) * size[0] * size[1])


def measured(recipe: Recipe, *pairs: PicturePair) -> events.Measured:
    found = report(recipe)
    output = dataclasses.replace(found.output, kl_mean=None, values={"psnr_db": 31.25, "ssim": 0.912})
    return events.Measured(recipe, dataclasses.replace(found, output=output, pictures=pairs))


def colours(app: DtypeApp) -> list[str]:
    """The colors of the half blocks on the screen, from left to right."""
    strips: list[Strip] = app.screen._compositor.render_strips()
    drawn = [segment for strip in strips for segment in strip if "▀" in segment.text and segment.style is not None]
    return list(dict.fromkeys(one.style.color.get_truecolor().hex for one in drawn))


def test_picture_is_drawn_with_two_pixels_per_cell() -> None:
    rows = (("#ff0000", "#00ff00"), ("#0000ff", "#ffffff"), ("#000000", "#808080"), ("#102030", "#405060"))
    picture = Picture(2, 4, b"".join(bytes(ImageColor.getrgb(each)) for row in rows for each in row))
    text = half_blocks(picture, 2, 20)
    assert text.plain == "▀▀\n▀▀\n"
    cells = [(span.style.color.triplet.hex, span.style.bgcolor.triplet.hex) for span in text.spans]
    assert cells == [*zip(*rows[:2], strict=True), *zip(*rows[2:], strict=True)]
    assert {len(line) for line in half_blocks(plain("red", (200, 100)), 30, 30).plain.split()} == {30}
    assert len(half_blocks(plain("red", (200, 100)), 300, 10).plain.split()) == 10


async def test_pictures_of_reference_and_candidate_are_shown_for_each_input() -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        app.controller.apply_recipe(BF16)
        first, second = PicturePair(plain("#aa0000"), plain("#00aa00")), PicturePair(plain("#0000aa"), plain("#aaaaaa"))
        await say(app, pilot, measured(BF16, first, second), events.Idle())
        await pilot.press("g")
        await pilot.pause()
        await pilot.pause()
        assert colours(app) == ["#aa0000", "#00aa00"]
        assert "PSNR 31.25 dB, SSIM 0.912000" in screen(app)
        await pilot.press("right")
        assert colours(app) == ["#0000aa", "#aaaaaa"]
        await pilot.press("right")
        assert colours(app) == ["#aa0000", "#00aa00"]
        await say(app, pilot, measured(BF16, PicturePair(plain("#aa0000"), plain("#bb00bb"))), events.Idle())
        assert colours(app) == ["#aa0000", "#bb00bb"]
        await pilot.press("escape")
        assert len(app.screen_stack) == 1


async def test_key_g_generates_text_for_a_model_without_pictures() -> None:
    async with launched() as (app, pilot):
        await ready(app, pilot)
        await say(app, pilot, measured(app.controller.experiment.recipe), events.Idle())
        await pilot.press("g")
        await pilot.pause()
        assert "Each token of the reference's text" in screen(app)
        assert not notices(app)
