"""What is written piece by piece shows what Textual's whole frames show, by a terminal that knows nothing of either."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

import pyte
import pytest
from rich.color import ColorSystem
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip

from dtype_tui.rendering.paced_frames import PacedFrames

SIZE = Size(30, 7)
STYLES = (
    None, Style(), Style(dim=True), Style(bold=True, color="red"), Style(reverse=True), Style(color="#123456", bgcolor="blue"),
    Style(bgcolor="default"), Style(bgcolor="color(49)"), Style(underline=True, color="green"), Style(reverse=True, color="cyan"),
)  # fmt: skip
WORDS = ("a", "bc", " ", "    ", "def ", "▾ ", "漢", "漢字x", "é", "· ")


def line(chance: random.Random) -> Strip:
    segments = [Segment(chance.choice(WORDS), chance.choice(STYLES)) for _ in range(chance.randint(0, 30))]
    return Strip(segments).adjust_cell_length(SIZE.width)


def seen(written: str, screen: pyte.Screen | None = None) -> pyte.Screen:
    screen = screen or pyte.Screen(*SIZE)
    screen.reset_mode(7, private=True)  # as Textual has it: a line's last cell does not wrap
    pyte.Stream(screen).feed(written)
    return screen


def cells(screen: pyte.Screen) -> list[object]:
    """What a person sees: of a blank the background, of reversed ones all."""
    shown: list[object] = []
    for row in range(SIZE.height):
        for column in range(SIZE.width):
            cell = screen.buffer[row][column]
            blank = cell.data == " " and not (cell.reverse or cell.underscore)
            shown.append((row, column, cell.data, cell.bg) if blank else (row, column, cell))
    return shown


def whole(lines: Sequence[Strip]) -> pyte.Screen:
    """A terminal after each line was written in full, as Textual renders it."""
    written = []
    for row, strip in enumerate(lines):
        written.append(f"\x1b[{row + 1};1H")
        for text, style, _ in strip:
            written.append(Strip.render_style(style, text, ColorSystem.TRUECOLOR) if style is not None else text)
    return seen("".join(written))


@pytest.mark.parametrize("seed", range(40))
def test_pieces_show_what_whole_frames_show(seed: int) -> None:
    chance = random.Random(seed)
    frames, screen = PacedFrames(SIZE, clear=True), seen("left there")
    lines = [line(chance) for _ in range(SIZE.height)]

    def draw(rows: frozenset[int]) -> Mapping[int, Strip]:
        return {row: lines[row] for row in rows}

    for _ in range(12):
        changed = [(row, 0, SIZE.width) for row in range(SIZE.height) if chance.random() < 0.4]
        for row, _, _ in changed:
            lines[row] = line(chance)
        frames.mark(changed)
        first = Region(chance.randint(0, 9), chance.randint(0, 5), chance.randint(0, 15), chance.randint(0, 4))
        for _ in range(chance.randint(0, 5)):  # what is left over comes later
            seen(frames.piece(draw, first, chance.choice((1, 20, 200)), ColorSystem.TRUECOLOR), screen)
    while piece := frames.piece(draw, Region(), 50, ColorSystem.TRUECOLOR):
        seen(piece, screen)
    assert cells(screen) == cells(whole(lines))


def test_what_is_shown_already_is_not_written_again() -> None:
    lines = [line(random.Random(1)) for _ in range(SIZE.height)]
    frames = PacedFrames(SIZE, clear=True)
    frames.piece(lambda rows: {row: lines[row] for row in rows}, Region(), 10_000, ColorSystem.TRUECOLOR)
    frames.mark((row, 0, SIZE.width) for row in range(SIZE.height))
    assert not frames.piece(lambda rows: {row: lines[row] for row in rows}, Region(), 10_000, ColorSystem.TRUECOLOR)


def test_where_the_keys_go_comes_first_and_the_rest_takes_turns() -> None:
    lines = [Strip([Segment(f"line {row}".ljust(SIZE.width))]) for row in range(SIZE.height)]
    frames, pieces = PacedFrames(SIZE, clear=True), []
    for number in range(SIZE.height + 1):
        lines[0] = Strip([Segment(f"line 0 {number}".ljust(SIZE.width))])  # always another one
        frames.mark([(0, 0, SIZE.width)])
        pieces.append(
            frames.piece(lambda rows: {row: lines[row] for row in rows}, Region(0, 4, 30, 2), 1, ColorSystem.STANDARD)
        )
    rows = [int(number) - 1 for piece in pieces for number in re.findall(r"\x1b\[(\d);", piece)]
    assert rows == [4, 5, 0, 1, 2, 3, 6, 0]
