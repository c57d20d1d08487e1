"""The table of colours: what must not be mixed up has colours of its own, and all can be read."""

from __future__ import annotations

import math
import re
from itertools import combinations
from pathlib import Path

import pytest
from rich.color import Color, ColorSystem
from rich.terminal_theme import TerminalTheme
from tests.helpers.recording_engine import make_app
from tests.helpers.scenes import ready
from textual.theme import Theme

from dtype_engine.core import dtypes
from dtype_engine.results.meaning import GRADES, SQNR_BF16, SQNR_FP8, SQNR_SIGNS, Word, sqnr_limits
from dtype_tui.config.config import Config
from dtype_tui.rendering import palette
from dtype_tui.rendering.palette import (
    ACCENT,
    DARK,
    FEW,
    LIGHT,
    TRACK,
    colour,
    cursor_variables,
    pill,
    ramp,
    sqnr_colour,
    themes,
    verdict_pill,
)

HUES = {colour(name) for name in dtypes.BY_NAME}
RAMP = {ramp(word) for word in GRADES}
THEMES = pytest.mark.parametrize("theme", [DARK, LIGHT], ids=["dark", "light"])


def luminance(rgb: tuple[int, ...]) -> float:
    """Return the relative luminance, as WCAG 2 defines it."""
    parts = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def shown(name: str, theme: TerminalTheme) -> tuple[int, ...]:
    return tuple(Color.parse(name).get_truecolor(theme))


@THEMES
def test_colors_of_dtypes_drift_and_accent_are_distinct(theme: TerminalTheme) -> None:
    for one, other in combinations([{shown(name, theme) for name in group} for group in (HUES, RAMP, {ACCENT})], 2):
        assert not one & other
    assert len({shown(name, theme) for name in HUES}) == len(HUES)


@THEMES
def test_colors_have_a_readable_contrast(theme: TerminalTheme) -> None:
    """On the background, and the text of a pill on it: a contrast of 4.5, which WCAG asks for."""
    for name in HUES | RAMP | {ACCENT}:
        for on in (tuple(theme.background_color), shown("black", theme)):
            lighter, darker = sorted((luminance(shown(name, theme)), luminance(on)), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, name
    assert TRACK not in HUES | RAMP | {ACCENT}


def perceived(rgb: tuple[int, ...]) -> tuple[float, ...]:
    """Lightness and two chromaticities in OKLab (Ottosson 2020), where distances are about as large as they look."""
    red, green, blue = (c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb)
    cones = (
        0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue,
        0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue,
        0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue,
    )
    long, middle, short = (each ** (1 / 3) for each in cones)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@THEMES
def test_all_colors_are_visibly_different(theme: TerminalTheme) -> None:
    """Black and white are 1 apart."""
    for one, other in combinations(sorted(HUES | RAMP | {ACCENT}), 2):
        apart = math.dist(perceived(shown(one, theme)), perceived(shown(other, theme)))
        assert apart >= 0.075, (one, other, apart)


def test_colors_of_dtypes_are_named_only_in_the_palette() -> None:
    """Drawing code gets the colors from `colour` and `pill`, so that only dtypes have them."""
    for file in Path(palette.__file__).parents[1].rglob("*.py"):
        words = re.findall(r'"(?:bold |dim )?(\w+)"', file.read_text(encoding="utf-8"))
        assert file == Path(palette.__file__) or not HUES & set(words), file


def test_drift_word_visible_is_bright_yellow_with_16_colors() -> None:
    """Terminals show this color as orange or yellow."""
    ramps = tuple(ramp(word) for word in ("invisible", "small", "visible", "broken"))
    assert ramps == ("green", "yellow", "bright_yellow", "red")


def test_families_of_dtypes_have_different_colors() -> None:
    families = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "nvfp4", "int8", "int4@g128")
    assert len({colour(name) for name in families}) == len(families)
    assert colour("mxfp8") == colour("fp8@128x128") == colour("float8_e5m2@tensor") == colour("float8_e4m3fn")
    assert colour("mxfp4") == colour("nvfp4")


@pytest.mark.parametrize(
    ("badness", "word"),
    [
        (math.inf, "exact"), (SQNR_BF16, "invisible"), (SQNR_BF16 - 0.1, "small"), (SQNR_FP8, "small"),
        (SQNR_FP8 - 0.1, "visible"), (SQNR_SIGNS - 0.1, "broken"), (-math.inf, "broken"), (math.nan, "broken"),
    ],
)  # fmt: skip
def test_color_of_an_sqnr_is_that_of_its_drift_word(badness: float, word: Word) -> None:
    assert sqnr_colour(badness, sqnr_limits(None)) == ramp(word)


def test_colored_labels_contain_the_short_dtype_name_or_the_drift_word() -> None:
    assert pill("float32")[0] == " f32 "
    assert pill(dtypes.STORED)[0] == " stored "
    assert verdict_pill("small")[0] == " small "
    assert verdict_pill("under the floor")[1] == verdict_pill("exact")[1]


@pytest.mark.parametrize("theme", themes(FEW)[:2], ids=["dark", "light"])
def test_shades_of_256_colors_are_gray_and_differ(theme: Theme) -> None:
    """Shown as the terminal shows them, by rich's choice of the 256. Only the light cursor has a tint."""
    tint = cursor_variables(theme.dark, FEW)["block-cursor-background"]
    shades = [theme.background, theme.surface, theme.panel, tint]
    numbers = [Color.parse(shade or "").downgrade(ColorSystem.EIGHT_BIT).number for shade in shades]
    assert len(set(numbers)) == len(shades)
    gray = {16, 231, *range(232, 256)}
    assert set(numbers[:3]) <= gray
    assert numbers[3] in gray or not theme.dark


@pytest.mark.parametrize(
    ("term", "colorterm", "theme"),
    [
        ("xterm-16color", "", "ansi-dark"),
        ("linux", "", "ansi-dark"),
        ("screen-256color", "", "dtype-dark"),
        ("xterm-16color", "truecolor", "dtype-dark"),
    ],
)
def test_terminal_of_16_colors_gets_its_own_colors(
    term: str, colorterm: str, theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLORTERM", colorterm)
    assert make_app().theme == theme
    assert make_app(config=Config("nord")).theme == "nord"


async def test_no_color_shows_text_in_the_terminals_own_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Textual's own filter, it would be black on black."""
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app(config=Config("ansi-dark"))
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        styles = [segment.style for strip in app.screen._compositor.render_strips() for segment in strip]
        colours = [part for style in styles if style is not None for part in (style.color, style.bgcolor)]
        assert all(part is None or part.is_default for part in colours)
