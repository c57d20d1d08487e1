"""Draws on the terminal in fewer bytes, for slow connections: only cells that have changed, and only the parts of a style that
change. Textual writes a changed line from the left edge of its widget on, with complete styles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from textual.driver import Driver

_MODE = r"\x1b\[\?(?:25|2026)[hl]"
_MOVE = r"\x1b\[(\d+);(\d+)H"
_PIECE = re.compile(rf"({_MODE})|\n?{_MOVE}|\x1b\[([\d;]*)m|([^\x00-\x1f\x7f-\x9f]++)")
"""Matches a mode that changes no cell, a move of the cursor, a style for further text, or text (ECMA-48: DECSET, CUP, SGR)."""
_FRAME = re.compile(rf"(?:{_MODE})*(?:{_MOVE}(?:{_PIECE.pattern})*)?")
_AMBIGUOUS = "▲▼○●←↑→↓…–·×±≈≤≥Δ"
"""Characters that are one cell wide, but two on terminals set up for East Asian fonts (Unicode's East Asian Width "A")."""
_NARROW = re.compile(rf"[ -~\u2500-\u259f▸▾✓✗{_AMBIGUOUS}\u2800-\u28ff]*")
"""Matches characters that are one cell wide and that the app draws often."""
_TO_AMBIGUOUS = re.compile(rf"[^{_AMBIGUOUS}]*[{_AMBIGUOUS}]|[^{_AMBIGUOUS}]+")


@dataclass(frozen=True, slots=True)
class _Style:
    """The parts of a style, as parameters of a control sequence."""

    colour: str = ""
    background: str = ""
    attributes: frozenset[str] = frozenset()
    """Other parameters, such as 1 for bold."""


_RESET = _Style()
_BOLD_AND_DIM = {"1", "2"}
"""The parameters for bold and dim text, both of which `ESC [ 22 m` switches off."""
_UNSEEN_ON_BLANKS = {"1", "2", "3"}


def with_short_frames(driver: type[Driver]) -> type[Driver]:
    """Return a subclass of `driver` that draws the same in fewer bytes. All its instances must draw on the same terminal."""
    cells = ShownCells()

    class ShortFrames(driver):  # type: ignore[misc, valid-type]
        def write(self, data: str) -> None:
            super().write(cells.shortened(data))

    return ShortFrames


class ShownCells:
    """The cells that a terminal shows, as far as they are known from what was written to it."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, tuple[str, _Style]]] = {}
        """(character, style) by row and column, counted from 1."""

    def shortened(self, data: str) -> str:
        """Return text with control sequences, usually shorter, that looks the same on the terminal as `data`. Both begin and end
        in the terminal's own style.

        If `data` has control sequences other than modes, cursor moves and styles, it is returned unchanged, and all cells count as
        unknown. If it writes every row from the first on, all its cells are written: the terminal's size may have changed, or the
        screen may need a repair.
        """
        pieces = _PIECE.findall(data) if _FRAME.fullmatch(data) else []
        begun = {int(row) for _, row, column, _, _ in pieces if column == "1"}
        if not pieces or (len(begun) > 2 and len(begun) == max(begun)):
            self._rows.clear()
        if not pieces:
            return data
        pen, wanted = _Pen(), _RESET
        row = column = 0  # column: where the next text begins, or 0 if it is unknown
        before_unknown = _before_unknown(pieces)
        for place, (mode, to_row, to_column, style, text) in enumerate(pieces):
            if to_row:
                row, column = int(to_row), int(to_column)
            elif text:
                column = self._draw(pen, row, column, text, wanted, combines=place in before_unknown)
            elif mode:
                pen.written.append(mode)
            else:
                wanted = _after(wanted, style)
        if column:
            pen.move_to(row, column)
        return pen.end()

    def _draw(self, pen: _Pen, row: int, column: int, text: str, style: _Style, combines: bool) -> int:
        """Draw the cells of a text that have changed. If a character has an unknown width, draw everything from the character
        before it on, because the two may combine. combines: whether a character of unknown width follows the text. Returns the
        column after the text, or 0 if it is unknown.
        """
        cells, blank = self._rows.setdefault(row, {}), _on_blank(style)
        known = _narrow(text) if column else 0
        if combines:
            known = min(known, len(text) - 1)
        drawn = [(character, blank if character == " " else style) for character in text[:known]]
        changed = [cells.get(place) != cell for place, cell in enumerate(drawn, column)]
        covered = pen.may_cover(row, column)
        for place in range(known):
            changed[place] |= covered
            covered = changed[place] and text[place] in _AMBIGUOUS
        for is_changed, run in groupby(range(known), changed.__getitem__):
            if is_changed:
                places = list(run)
                pen.move_to(row, column + places[0])
                pen.write(text[places[0] : places[-1] + 1], style)
        cells.update(enumerate(drawn, column))
        if known == len(text):
            return column + known
        if column:
            pen.move_to(row, column + known)
            self._rows[row] = {place: cell for place, cell in cells.items() if place < column + known}
        pen.write(text[known:], style, exact=True)
        return 0


class _Pen:
    """Writes text and control sequences to `written`, except control sequences that change nothing."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self._style = _RESET
        self._place: tuple[int, int] | None = None
        """(row, column) of the cursor, if known."""
        self._adrift = False
        """Whether the cursor may be a column to the right of `_place`, because of an ambiguous character."""

    def move_to(self, row: int, column: int) -> None:
        if self._place is not None and not self._adrift and self._place[0] == row and column >= self._place[1]:
            right = column - self._place[1]
            self.written.append(f"\x1b[{right}C" if right else "")
        else:
            self.written.append(f"\x1b[{row};{column}H")
        self._place, self._adrift = (row, column), False

    def may_cover(self, row: int, column: int) -> bool:
        """Return whether the character that was written last may be two cells wide and cover this cell, too."""
        return self._adrift and self._place == (row, column)

    def write(self, text: str, style: _Style, exact: bool = False) -> None:
        """Write text at the cursor. Unless `exact`, blanks are written in the current style if they look the same in it."""
        if style != self._style and (exact or text.strip(" ") or _on_blank(style) != _on_blank(self._style)):
            self.written.append(_between(self._style, style))
            self._style = style
        if self._place is None or _narrow(text) < len(text):
            self.written.append(text)
            self._place = None
            return
        for part in _TO_AMBIGUOUS.findall(text):
            if self._adrift:
                self.move_to(*self._place)
            self.written.append(part)
            self._place = self._place[0], self._place[1] + len(part)
            self._adrift = part[-1] in _AMBIGUOUS

    def end(self) -> str:
        return "".join([*self.written, _between(self._style, _RESET)])


def _before_unknown(pieces: list[tuple[str, ...]]) -> set[int]:
    """Return the indices of the texts in `pieces` that are directly followed by a character of unknown width."""
    found: set[int] = set()
    before = -1  # the index of the text before, or -1 after a move
    for place, (mode, _, _, style, text) in enumerate(pieces):
        if text:
            if before >= 0 and not _NARROW.fullmatch(text[0]):
                found.add(before)
            before = place
        elif mode or not style:
            before = -1
    return found


def _narrow(text: str) -> int:
    """Return how many characters at the beginning are surely one cell wide and do not combine with the next character."""
    match = _NARROW.match(text)
    end = match.end() if match is not None else 0
    return end if end == len(text) else max(0, end - 1)


@lru_cache(4096)
def _on_blank(style: _Style) -> _Style:
    """Return the parts of a style that can be seen on a blank."""
    return _Style(background=style.background) if style.attributes <= _UNSEEN_ON_BLANKS else style


@lru_cache(4096)
def _after(style: _Style, parameters: str) -> _Style:
    colour, background, attributes = style.colour, style.background, set(style.attributes)
    each = iter(parameters.split(";"))
    for code in each:
        if code in ("", "0"):
            colour, background, attributes = "", "", set()
        elif code in ("38", "48"):
            kind = next(each, "")
            whole = ";".join([code, kind, *(next(each, "") for _ in range(1 if kind == "5" else 3))])
            colour, background = (whole, background) if code == "38" else (colour, whole)
        elif len(code) > 1 and code[:-1] in ("3", "9"):
            colour = code if code != "39" else ""
        elif len(code) > 1 and code[:-1] in ("4", "10"):
            background = code if code != "49" else ""
        else:
            attributes.add(code)
    return _Style(colour, background, frozenset(attributes))


@lru_cache(4096)
def _between(one: _Style, other: _Style) -> str:
    """Return the shortest control sequence that changes a style to another, or "" if they are equal."""
    if one == other:
        return ""
    if other == _RESET:
        return "\x1b[m"
    codes, kept = [], one
    lost = one.attributes - other.attributes
    if lost and one.attributes <= _BOLD_AND_DIM:
        codes, kept = ["22"], _Style(one.colour, one.background)
    elif lost:
        codes, kept = ["0"], _RESET
    codes += sorted(other.attributes - kept.attributes)
    codes += [other.colour or "39"] if other.colour != kept.colour else []
    codes += [other.background or "49"] if other.background != kept.background else []
    return f"\x1b[{';'.join(codes)}m"
