"""Frames for a slow line: what differs from what the terminal shows, a piece at a time, the most wanted first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip

Cell = tuple[str, str, str]
"""A character, the numbers of the sequence that sets its style, and those of them that can be seen on a blank, which has no others.
The right half of a wide character is an empty one.
"""
BLANK: Cell = (" ", "", "")
_WORTH_A_JUMP = 6
"""Cells. To jump over fewer takes more bytes than to write them again."""
_SHOWS_ON_BLANKS = ("underline", "underline2", "reverse", "strike", "overline", "frame", "encircle", "blink", "blink2")


class PacedFrames:
    """Knows what each cell of the terminal shows, as far as it was written by this, and which cells are to be drawn.

    Between two pieces the screen may change. What is written is always what it shows by then, so frames that nobody has seen yet
    are merged.
    """

    def __init__(self, size: Size, clear: bool) -> None:
        """clear: the terminal is cleared first, and all is to be drawn; otherwise nothing is known of what it shows."""
        self._size = size
        self._clear = clear
        self._shown: list[list[Cell | None]] = [[BLANK if clear else None] * size.width for _ in range(size.height)]
        self._due = [bytearray((b"\1" if clear else b"\0") * size.width) for _ in range(size.height)]
        self._next_row = 0
        self.begun = False
        """Whether a piece was written."""

    @property
    def size(self) -> Size:
        return self._size

    def mark(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Cells (row, from this column, to before this one) may have changed."""
        for row, begin, end in spans:
            if 0 <= row < len(self._due):
                due = self._due[row]
                begin, end = max(0, begin), min(end, len(due))
                due[begin:end] = b"\1" * max(0, end - begin)

    def piece(
        self, draw: Callable[[frozenset[int]], Mapping[int, Strip]], first: Region, most: int, colours: ColorSystem
    ) -> str:
        """What to write next; an empty string when the terminal shows all. It is `most` bytes long, or a line more.

        draw: gives the lines that are asked for, as they are now. first: where keys are answered.
        """
        written = ["\x1b[2J"] if self._clear else []
        self._clear, self.begun = False, True
        length = sum(map(len, written))
        rows = [row for row in range(first.y, first.bottom) if self._is_due(row, first)]
        rest = [*range(self._next_row, len(self._due)), *range(self._next_row)]
        turns = [(row, first) for row in rows] + [(row, None) for row in rest if 1 in self._due[row]]
        # Drawn a few lines at a time: most of a page would be drawn in vain.
        for at in range(0, len(turns), 4):
            lines = draw(frozenset(row for row, _ in turns[at : at + 4]))
            for row, region in turns[at : at + 4]:
                if row not in lines:
                    continue
                begin, end = (region.x, region.right) if region is not None else (0, self._size.width)
                words = self._line(row, begin, end, _cells(lines[row], self._size.width, colours))
                if words:
                    written.append(words)
                    length += len(words)
                if region is None:
                    self._next_row = (row + 1) % len(self._due)
                if length >= most:
                    return "".join(written)
        return "".join(written)

    def _is_due(self, row: int, region: Region) -> bool:
        return 0 <= row < len(self._due) and 1 in self._due[row][region.x : region.right]

    def _line(self, row: int, begin: int, end: int, cells: list[Cell]) -> str:
        """The due cells of a row between two columns, where they differ from what is shown."""
        due, shown = self._due[row], self._shown[row]
        end = min(end, len(due))
        differ = [x for x in range(max(0, begin), end) if due[x] and shown[x] != cells[x]]
        due[begin:end] = bytes(max(0, end - begin))
        written: list[str] = []
        style, on_blanks, at = "", "", -1
        for x in differ:
            if x < at:
                continue  # written together with an earlier one
            start = x
            while start > 0 and not cells[start][0]:
                start -= 1  # no half of a wide character alone
            if 0 <= at < start <= at + _WORTH_A_JUMP and all(cells[i] == shown[i] for i in range(at, start)):
                start = at
            if start != at:
                written.append(f"\x1b[{row + 1};{start + 1}H" if at < 0 else f"\x1b[{start + 1}G")
            stop = x + 1
            while stop < len(cells) and not cells[stop][0]:
                stop += 1
            for i in range(start, stop):
                text, wanted, wanted_on_blanks = cells[i]
                if on_blanks != wanted_on_blanks if text == " " else style != wanted:
                    written.append(f"\x1b[0;{wanted}m" if wanted and style else f"\x1b[{wanted}m")
                    style, on_blanks = wanted, wanted_on_blanks
                written.append(text)
                shown[i] = cells[i]
            at = stop
        if style:
            written.append("\x1b[m")
        return "".join(written)


def _cells(strip: Strip, width: int, colours: ColorSystem) -> list[Cell]:
    cells: list[Cell] = []
    for text, style, control in strip:
        if control:
            continue
        numbers, on_blanks = _numbers(style, colours)
        for character in text:
            wide = cell_len(character) if not character.isascii() else 1
            if wide == 0 and cells:
                before, *drawn = cells.pop()
                cells.append((before + character, drawn[0], drawn[1]))
                continue
            cells.append((character, on_blanks if character == " " else numbers, on_blanks))
            if wide == 2:
                cells.append(("", numbers, on_blanks))
    del cells[width:]
    cells += [BLANK] * (width - len(cells))
    return cells


@lru_cache(maxsize=4096)
def _numbers(style: Style | None, colours: ColorSystem) -> tuple[str, str]:
    """The numbers of the sequence for a style, and those of them that can be seen on a blank."""
    if style is None:
        return "", ""
    own = Style(
        color=None if style.color is None or style.color.is_default else style.color,
        bgcolor=None if style.bgcolor is None or style.bgcolor.is_default else style.bgcolor,
    )
    attributes = style.without_color
    everything = Strip.render_ansi(attributes + own, colours)
    if any(getattr(style, name) for name in _SHOWS_ON_BLANKS):
        return everything, everything
    return everything, Strip.render_ansi(Style(bgcolor=own.bgcolor), colours)
