"""Frames that are shortened to fewer bytes look the same on a terminal, whatever was written before."""

from __future__ import annotations

import random

import pyte
import pytest
from rich.console import Console
from rich.style import Style
from tests.helpers.recording_engine import make_app
from textual.drivers.headless_driver import HeadlessDriver
from textual.geometry import Size

from dtype_tui.process.short_frames import ShownCells

COLOURS = (None, "default", "red", "bright_blue", "color(9)", "color(208)", "#102030", "#f0a45d")
TEXTS = (" ", "a", "some words", "▄▄▖", "⠉⠒⠤", "漢字", "e\u0301", "…", "│ ")
COMBINING = "\u0301s"


class Terminal:
    """A terminal that keeps its cells from one write to the next."""

    def __init__(self) -> None:
        self._screen = pyte.Screen(600, 13)  # a line more than is drawn, since a line feed in the last one would scroll
        self._stream = pyte.Stream(self._screen)

    def after(self, data: str) -> list[list[pyte.screens.Char]]:
        self._stream.feed(data)
        assert self._screen.cursor.attrs == self._screen.default_char, "the next text would have a style"
        return [list(map(_as_seen, map(self._screen.buffer[row].__getitem__, range(120)))) for row in range(12)]

    @property
    def cursor(self) -> tuple[int, int]:
        return self._screen.cursor.y, self._screen.cursor.x


def _as_seen(cell: pyte.screens.Char) -> pyte.screens.Char:
    """Color, bold and italic type can't be seen on a blank."""
    hides = cell.data == " " and not (cell.reverse or cell.underscore)
    return cell._replace(fg="default", bold=False, italics=False) if hides else cell


def frame(chance: random.Random, console: Console) -> str:
    """A frame as Textual writes it: pieces of lines, each after a move of the cursor, often to where it is."""
    written = ""
    row, column = 1, 1
    for _ in range(40):
        if chance.random() < 0.5:
            row, column = chance.randint(1, 12), chance.randint(1, 40)
        written += f"\x1b[{row};{column}H"
        for place in range(chance.randint(0, 3)):
            colour, background = chance.choices(COLOURS, k=2)
            marks = {name: True for name in ("bold", "dim", "underline", "reverse", "italic") if chance.random() < 0.2}
            text = chance.choice((*TEXTS, COMBINING) if place else TEXTS)
            written += Style(color=colour, bgcolor=background, **marks).render(text, color_system=console._color_system)
            column += len(text)
        written += chance.choice(("", "", "\n"))
    return written + "\x1b[1;1H"


@pytest.mark.parametrize("system", ["truecolor", "256", "standard"])
@pytest.mark.slow
def test_shortened_frames_give_the_same_screen_as_full_frames(system: str) -> None:
    chance = random.Random(system)
    console = Console(color_system=system, force_terminal=True)  # type: ignore[arg-type]
    cells, plain, short, written, less = ShownCells(), Terminal(), Terminal(), 0, 0
    frames: list[str] = []
    for _ in range(120):
        again = bool(frames) and chance.random() < 0.5
        frames.append(chance.choice(frames) if again else frame(chance, console))
        fewer = cells.shortened(frames[-1])
        assert short.after(fewer) == plain.after(frames[-1])
        assert short.cursor == plain.cursor
        written, less = written + len(frames[-1]), less + len(fewer)
    assert less < 0.8 * written


def test_shortened_frame_has_only_changed_cells() -> None:
    cells = ShownCells()
    data = (
        "\x1b[3;1H\x1b[38;2;1;2;3;48;2;9;9;9mab\x1b[0m\x1b[38;2;4;5;6;48;2;9;9;9mcd\x1b[0m\n"
        "\x1b[3;5H\x1b[1;38;2;4;5;6;48;2;9;9;9me\x1b[0m\x1b[3;6H\x1b[38;2;4;5;6;48;2;9;9;9mf g\x1b[0m\x1b[1;1H"
    )
    assert cells.shortened(data) == (
        "\x1b[3;1H\x1b[38;2;1;2;3;48;2;9;9;9mab\x1b[38;2;4;5;6mcd\x1b[1me\x1b[22mf g\x1b[1;1H\x1b[m"
    )
    assert cells.shortened(data) == "\x1b[1;1H"
    changed = data.replace("ab", "aX").replace("f g", "f h")
    assert cells.shortened(changed) == ("\x1b[3;2H\x1b[38;2;1;2;3;48;2;9;9;9mX\x1b[5C\x1b[38;2;4;5;6mh\x1b[1;1H\x1b[m")
    for other in ("", "\x1b[?2026l", "\x1b[?1049h", "\x1b]0;title\x07", "\x1b[18t", "words", "\x1b[1mwords\x1b[m"):
        assert cells.shortened(other) == other
    assert cells.shortened(data).startswith("\x1b[3;1H\x1b[38;2;1;2;3;48;2;9;9;9mab"), (
        "the other texts may have cleared it"
    )


def test_frame_with_an_unknown_control_byte_is_not_shortened() -> None:
    data = f"\x1b[3;1H{'a' * 5000}\x07\x1b[1;1H"
    assert ShownCells().shortened(data) == data


def test_figures_after_an_arrow_of_two_cells_are_drawn_at_the_right_cells() -> None:
    """Terminals set up for East Asian fonts draw arrows and the like in two cells. Here, a wide character is in their place."""
    cells, screen = ShownCells(), Terminal()
    for before, after in (("2.2e-5", "1.9e-12"), ("2.2e-5", "1.7e-12"), ("3.2e-5", "-1.7e-12"), ("3.2e-5", "±1.7e-1")):
        for frame in (f"\x1b[2;1H{before} →{after} \x1b[1;1H", f"\x1b[2;1H\x1b[1m{before} →\x1b[0m{after} \x1b[1;1H"):
            fewer = cells.shortened(frame).replace("→", "漢").replace("±", "漢")
            shown = "".join(cell.data for cell in screen.after(fewer)[1])
            assert shown[:6] == before
            assert shown[8 : 8 + len(after)].lstrip("漢 ") == after.lstrip("±")


def test_full_redraw_is_not_shortened() -> None:
    """A full redraw repairs what another program wrote, and may follow a change of the terminal's size."""
    cells = ShownCells()
    screen = "\n".join(f"\x1b[{row};1Hrow {row}" for row in range(1, 9)) + "\x1b[1;1H"
    first = cells.shortened(screen)
    assert cells.shortened(screen) == first
    smaller = screen[: screen.index("\n\x1b[6;1H")] + "\x1b[1;1H"
    assert Terminal().after(cells.shortened(smaller)) == Terminal().after(smaller)
    assert cells.shortened("\x1b[4;1Hrow 4\x1b[8;1Hrow 8\x1b[1;1H") == "\x1b[8;1Hrow 8\x1b[1;1H"


def test_cells_after_wide_characters_are_rewritten() -> None:
    """Terminals disagree on the width of some characters, so it is unknown where the text after them is."""
    cells = ShownCells()
    line = "\x1b[2;1Hab漢cd\x1b[2;20Hef\x1b[1;1H"
    cells.shortened(line)
    assert cells.shortened(line) == "\x1b[2;2Hb漢cd\x1b[2;20Hef\x1b[1;1H"


async def test_app_writes_shortened_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(HeadlessDriver, "write", lambda driver, data: written.append(data))
    monkeypatch.setattr("textual.app.App.get_driver_class", lambda app: HeadlessDriver)
    driver = make_app().driver_class
    assert issubclass(driver, HeadlessDriver)
    terminal = driver(make_app(), size=Size(80, 24))
    for _ in range(2):
        terminal.write("\x1b[2;1H\x1b[1ma\x1b[0m\x1b[1mb\x1b[0m\x1b[1;1H")
    assert written == ["\x1b[2;1H\x1b[1mab\x1b[1;1H\x1b[m", "\x1b[1;1H"]


async def test_ctrl_l_redraws_the_whole_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have written to the terminal, which the app can't know. A frame of all rows is written in full."""
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        drawn: list[tuple[object, ...]] = []
        await pilot.pause()
        monkeypatch.setattr(app.screen, "refresh", lambda *regions, **how: drawn.append((*regions, *how)))
        await pilot.press("ctrl+l")
        assert () in drawn
