"""What is written in fewer bytes looks the same on a terminal."""

from __future__ import annotations

import random

import pyte
import pytest
from rich.console import Console
from rich.style import Style
from tests.helpers.recording_engine import make_app
from textual.drivers.headless_driver import HeadlessDriver
from textual.geometry import Size

from dtype_tui.process.short_styles import shortened, with_short_styles

COLOURS = (None, "default", "red", "bright_blue", "color(9)", "color(208)", "#102030", "#f0a45d")
TEXTS = (" ", "a", "some words", "▄▄▖", "⠉⠒⠤", "漢字", "e\u0301", "…", "│ ")


def shown(data: str) -> list[dict[int, pyte.screens.Char]]:
    screen = pyte.Screen(600, 12)
    pyte.Stream(screen).feed(data)
    assert screen.cursor.attrs == screen.default_char, "the next text would have a style"
    return [dict(screen.buffer[row]) for row in range(12)]


def frame(chance: random.Random, console: Console) -> str:
    """A frame as Textual writes it: pieces of lines, each after a move of the cursor, often to where it is."""
    written = ""
    row, column = 1, 1
    for _ in range(40):
        if chance.random() < 0.5:
            row, column = chance.randint(1, 12), chance.randint(1, 40)
        written += f"\x1b[{row};{column}H"
        for _ in range(chance.randint(0, 3)):
            colour, background = chance.choices(COLOURS, k=2)
            marks = {name: True for name in ("bold", "dim", "underline", "reverse", "italic") if chance.random() < 0.2}
            text = chance.choice(TEXTS)
            written += Style(color=colour, bgcolor=background, **marks).render(text, color_system=console._color_system)
            column += len(text)
        written += chance.choice(("", "", "\n"))
    return written + "\x1b[1;1H"


@pytest.mark.parametrize("system", ["truecolor", "256", "standard"])
def test_shorter_and_the_same_to_the_eye(system: str) -> None:
    chance = random.Random(system)
    whole, short = 0, 0
    for _ in range(60):
        data = frame(chance, Console(color_system=system, force_terminal=True))  # type: ignore[arg-type]
        less = shortened(data)
        assert shown(less) == shown(data)
        whole, short = whole + len(data), short + len(less)
    assert short < whole


def test_only_what_changes_is_set() -> None:
    data = (
        "\x1b[3;1H\x1b[38;2;1;2;3;48;2;9;9;9mab\x1b[0m\x1b[38;2;4;5;6;48;2;9;9;9mcd\x1b[0m\n"
        "\x1b[3;5H\x1b[1;38;2;4;5;6;48;2;9;9;9me\x1b[0m\x1b[3;6H\x1b[38;2;4;5;6;48;2;9;9;9mf\x1b[0m plain\x1b[1;1H"
    )
    assert shortened(data) == (
        "\x1b[3;1H\x1b[38;2;1;2;3;48;2;9;9;9mab\x1b[38;2;4;5;6mcd\n\x1b[3;5H\x1b[1me\x1b[22mf\x1b[m plain\x1b[1;1H"
    )
    for other in ("", "\x1b[?1049h", "\x1b[?2026l", "\x1b]0;title\x07", "\x1b[18t"):
        assert shortened(other) == other


async def test_the_app_writes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(HeadlessDriver, "write", lambda driver, data: written.append(data))
    monkeypatch.setattr("textual.app.App.get_driver_class", lambda app: HeadlessDriver)
    driver = make_app().driver_class
    assert issubclass(driver, HeadlessDriver)
    driver(make_app(), size=Size(80, 24)).write("\x1b[1ma\x1b[0m\x1b[1mb\x1b[0m")
    assert written == ["\x1b[1mab\x1b[m"]
    assert with_short_styles(driver).__name__ == "HeadlessDriver"
