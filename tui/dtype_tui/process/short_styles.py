"""Writes the colors of text in fewer bytes than Textual does.

Textual writes the complete style of each piece of text before it, and resets it afterwards: some 40 bytes for a piece with a color
on a background, although the next piece usually has the same background.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from textual.driver import Driver

_STYLE_OR_MOVE = re.compile(r"\x1b\[([\d;]*)m|\x1b\[(\d+);(\d+)H|\n")
"""A control sequence that sets the style of the text after it, and what only moves the cursor (ECMA-48: SGR, CUP, LF)."""
_NARROW = re.compile(r"[ -~\u2500-\u259f\u25b8\u25be\u2800-\u28ff]*")
"""Characters that are one cell wide on every terminal: ASCII, lines, blocks, the marks of closed and open nodes, and braille."""


@dataclass(frozen=True, slots=True)
class _Style:
    """The parts of a style, as the parameters of a control sequence."""

    colour: str = ""
    background: str = ""
    attributes: frozenset[str] = frozenset()
    """Other parameters, such as 1 for bold."""


_RESET = _Style()
_BOLD_AND_DIM = {"1", "2"}
"""The parameters for bold and dim text. The control sequence `ESC [ 22 m` switches both off, and leaves other attributes on."""


def with_short_styles(driver: type[Driver]) -> type[Driver]:
    """Return a driver that writes what `driver` writes, with shorter sequences for styles."""

    def write(self: Driver, data: str) -> None:
        driver.write(self, shortened(data))

    return type(driver.__name__, (driver,), {"write": write})


def shortened(data: str) -> str:
    """Return text with control sequences that looks the same on a terminal, but sets only those parts of a style that change, and
    moves the cursor only if it is elsewhere.

    data: begins and ends in the terminal's own style.
    """
    written, drawn, wanted, place = [], _RESET, _RESET, 0
    cursor: tuple[int, int] | None = None  # (row, column), or None if it is unknown
    for match in _STYLE_OR_MOVE.finditer(data):
        if text := data[place : match.start()]:
            written += [_between(drawn, wanted), text]
            drawn = wanted
            cursor = (cursor[0], cursor[1] + len(text)) if cursor is not None and _NARROW.fullmatch(text) else None
        place = match.end()
        if match[1] is not None:
            wanted = _after(wanted, match[1])
            continue
        before, cursor = cursor, (int(match[2]), int(match[3])) if match[2] else None
        if before is None or before != cursor:
            written.append(match[0])
    return "".join([*written, _between(drawn, wanted), data[place:]])


@lru_cache(4096)
def _after(style: _Style, parameters: str) -> _Style:
    """Return the style after a control sequence with these parameters."""
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
