"""All colors of the screen, in one table.

Three groups share no color: a hue for each family of dtypes, a ramp from green to red for how bad a drift is, and an accent for
titles, keys and the edge of the cursor. Drawing code uses the names of the terminal's 16 colors. The app shows each name in the
table's color for a dark or a light theme; with `ansi-dark` and `ansi-light`, the terminal's own colors are used. The former is
chosen by itself on a terminal of 16 colors. A color never carries information alone: it accompanies a word, a number or the length
of a bar.

"bright_yellow" stands for the orange of the ramp, because "bright_red" would look like its red.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.color import Color
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from textual.theme import Theme

from dtype_engine.core import dtypes

if TYPE_CHECKING:
    from dtype_engine.results.meaning import Word

_TABLE = {
    # name: (dark theme, light theme)
    "black": ("#10131a", "#ffffff"),  # the text of a pill
    "red": ("#f0616d", "#b91c2e"),  # broken
    "green": ("#8fcf8f", "#2b7a37"),  # exact, invisible
    "yellow": ("#e5c878", "#866300"),  # small
    "blue": ("#25304a", "#d3def5"),  # the background of the cursor's line
    "magenta": ("#ea96dc", "#730078"),  # floats of 8 bits
    "cyan": ("#3fbcf0", "#0072a6"),  # bfloat16
    "white": ("#7f8aa3", "#57627a"),  # float32
    "bright_black": ("#3a4153", "#c3cad8"),  # the empty part of a bar
    "bright_red": ("#b98cf2", "#7546c0"),  # floats of 4 and 6 bits
    "bright_green": ("#8c9518", "#2f3d00"),  # integers of 4 bits
    "bright_yellow": ("#f08a5b", "#b04a12"),  # visible
    "bright_blue": ("#7aa2f7", "#2f5fd0"),  # the accent
    "bright_magenta": ("#e263b4", "#a5246f"),  # integers of 8 bits
    "bright_cyan": ("#4fe3d0", "#00645a"),  # float16
    "bright_white": ("#b4bdd0", "#3f4960"),  # float64, and all that no rule casts to
}
_TEXT = "#c3cad9", "#262c38"
_SHADES = {
    # what has it: (dark theme, light theme, dark and light theme on a terminal of 256 colors)
    "background": ("#11131a", "#ffffff", "#121212", "#ffffff"),
    "surface": ("#161923", "#f5f6fa", "#1c1c1c", "#f5f5f5"),  # panes and windows
    "panel": ("#1b2030", "#e8ebf3", "#262626", "#e4e4e4"),  # the lines at the edges of the screen
    "border": ("#2a2f3d", "#ccd2de", "#3a3a3a", "#c6c6c6"),
    "cursor": (*_TABLE["blue"], "#3a3a3a", "#d7d7ff"),
}
"""What lies below the text. Of the 256 colors, the nearest to a dark blue is navy, teal or black, so they are gray there."""
FEW = "256"
"""Rich's name for a terminal of 256 colors. One of 16 colors is `standard`."""
ACCENT = "bright_blue"
TRACK = "bright_black"
_HUES = {"float64": "bright_white", "float32": "white", "bfloat16": "cyan", "float16": "bright_cyan"}
_HUES_BY_BITS = {
    ("float", 8): "magenta", ("float", 6): "bright_red", ("float", 4): "bright_red",
    ("int", 8): "bright_magenta", ("int", 6): "bright_magenta",
    **{("int", bits): "bright_green" for bits in (5, 4, 3, 2)},
}  # fmt: skip


def _meanings(index: int) -> TerminalTheme:
    colours = [Color.parse(pair[index]).get_truecolor() for pair in _TABLE.values()]
    text, background = (Color.parse(each).get_truecolor() for each in (_TEXT[index], _SHADES["background"][index]))
    return TerminalTheme(background, text, list(colours[:8]), list(colours[8:]))


def _shade(what: str, index: int, colours: str | None) -> str:
    return _SHADES[what][index + (2 if colours == FEW else 0)]


def _theme(name: str, index: int, colours: str | None) -> Theme:
    accent = _TABLE[ACCENT][index]
    background, surface, panel, border = (_shade(what, index, colours) for what in list(_SHADES)[:4])
    return Theme(
        name=name,
        primary=accent,
        secondary=_TABLE["cyan"][index],
        accent=accent,
        foreground=_TEXT[index],
        background=background,
        surface=surface,
        panel=panel,
        success=_TABLE["green"][index],
        warning=_TABLE["yellow"][index],
        error=_TABLE["red"][index],
        dark=index == 0,
        variables={"surface-lighten-2": border},
    )


DARK, LIGHT = _meanings(0), _meanings(1)
"""The values that the names of the 16 terminal colors have in a dark theme and in a light theme."""
HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#ffffff",
    secondary="#ffff00",
    accent="#00ffff",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    success="#00ff00",
    warning="#ffff00",
    error="#ff6b6b",
    dark=True,
    variables={"surface-lighten-2": "#ffffff", "block-cursor-text-style": "reverse"},
)
"""White on black, with yellow and cyan. Every pair of colors has a contrast ratio of at least 7:1."""


def themes(colours: str | None) -> tuple[Theme, ...]:
    """Return the app's own themes, the default first. All of Textual's themes work, too. colours: rich's name for the number of
    colors that the terminal has, such as `truecolor`.
    """
    return _theme("dtype-dark", 0, colours), _theme("dtype-light", 1, colours), HIGH_CONTRAST


THEMES = themes("truecolor")


def default_theme(colours: str | None) -> str:
    """Return the theme for who has chosen none. With 16 colors, they are the terminal's own: the nearest of the 16 to most of ours
    is white.
    """
    return "ansi-dark" if colours == "standard" else THEMES[0].name


def cursor_variables(dark: bool, colours: str | None) -> dict[str, str]:
    """Return the style sheet variables that set the background of the cursor's line in every list. colours: as for `themes`."""
    tint = _shade("cursor", 0 if dark else 1, colours)
    return {
        "block-cursor-background": tint,
        "block-cursor-foreground": _TEXT[0 if dark else 1],
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": tint,
    }


def colour(dtype: str) -> str:
    """Return the name of the color of a dtype's family. A block format, such as MXFP4, has the color of its elements' family."""
    row = dtypes.BY_NAME.get(dtype)
    if dtype in _HUES or row is None:
        return _HUES.get(dtype, "bright_white")
    return _HUES_BY_BITS.get((row.kind, row.bits), "bright_white")


def pill(dtype: str) -> tuple[str, Style]:
    """Return a dtype's badge: its short name between blanks, and the style."""
    word = "stored" if dtype == dtypes.STORED else dtypes.short_name(dtype)
    return f" {word} ", _filled(colour(dtype))


def ramp(word: Word) -> str:
    """Return the name of the color for a rating of drift, such as "yellow" for "small"."""
    from dtype_engine.results.meaning import GRADES  # imported late, for a faster first paint

    grade = GRADES[word]
    return "bright_yellow" if grade == "orange" else grade


def sqnr_colour(sqnr_db: float, limits: Iterable[tuple[float, Word]]) -> str:
    """Return the name of the color for an SQNR in dB or NaN. limits: the minimum SQNR of each rating, the best first."""
    return ramp(next((word for least, word in limits if sqnr_db >= least), "broken"))


def heat(share: float) -> str:
    """Return the name of a color between green and red. share: how bad something is, from 0 (best) to 1 (worst)."""
    parts = ((0.75, "red"), (0.5, "bright_yellow"), (0.25, "yellow"))
    return next((name for least, name in parts if share > least), "green")


def verdict_pill(word: Word) -> tuple[str, Style]:
    """Return the badge of a rating of drift, such as "small": the word between blanks, and the style."""
    return f" {word} ", _filled(ramp(word))


def _filled(name: str) -> Style:
    return Style(color="black", bgcolor=name, bold=True)
