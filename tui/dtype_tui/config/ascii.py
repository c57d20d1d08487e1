"""Redraws every line in ASCII, with the same width, for terminals and fonts that lack Unicode characters. This happens after all
drawing. Some characters are replaced by two, such as `→` by `->`, because `>` alone would be misleading; a blank elsewhere in the
line is then removed.
"""

from __future__ import annotations

import locale
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len
from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from dtype_engine.core.units import apportioned

_SAME_WIDTH = {
    "▾": "v", "▸": ">", "❯": ">", "•": "*", "›": ">", "‹": "<", "→": ">", "←": "<", "↑": "^", "↓": "v", "·": ".",
    "…": "~", "×": "x", "⏎": "$", "Δ": "d", "±": "+", "≥": ">", "≤": "<", "²": "2", "√": "V", "Σ": "S", "‖": "|",
    "⚠": "!", "✓": "+", "✗": "x", "⟦": "[", "⟧": "]", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"',
    "\xa0": " ", "█": "#", "▓": "%", "▒": "=", "░": "-", "▏": " ", "▎": " ", "▍": "-", "▌": ">", "▋": "=", "▊": "=",
    "▉": "#", "▀": '"', "▄": "=", "▖": "-", "▐": "|", "▔": "-", "▁": "_", "▂": "_", "▃": "_", "▅": "=", "▆": "=", "▇": "#",
    "■": "#", "□": "o", "●": "o", "○": "o", "◆": "*", "◇": "*", "▲": "^", "▼": "v", "∞": "!", "≈": "~",
}  # fmt: skip
_WIDER = {"→": "->", "←": "<-", "±": "+-", "≥": ">=", "≤": "<="}
_RANGE = re.compile(r"(?<=\S) … (?=\S)")
"""An ellipsis between the ends of a range. Elsewhere, an ellipsis says that a text was cut."""
_EIGHTHS = "▏▎▍▌▋▊▉█"
_BAR = re.compile(f"[{_EIGHTHS}]*█[{_EIGHTHS}]*|[{_EIGHTHS}]{{2,}}")
"""A bar in eighths of a cell. A single character may be the edge of the cursor."""
_ARROWS = "←↑→↓"
_BOX_FROM, _BOX_TO = 0x2500, 0x257F
_BRAILLE_FROM, _BRAILLE_TO = 0x2800, 0x28FF


def wants_ascii(setting: str) -> bool:
    """Return whether to draw in ASCII. setting: `always`, `never`, or `auto`: only if the locale's encoding is not UTF-8."""
    if setting != "auto":
        return setting == "always"
    locale_name = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    if locale_name:
        return "utf-8" not in locale_name.lower() and "utf8" not in locale_name.lower()
    return locale.getpreferredencoding(False).lower().replace("-", "") != "utf8"


@lru_cache(4096)
def _in_ascii(character: str) -> str:
    """Return the ASCII replacement of a character, which has the same width. An unknown character becomes one `?` for each cell."""
    if character.isascii():
        return character
    if character in _SAME_WIDTH:
        return _SAME_WIDTH[character]
    code = ord(character)
    if _BOX_FROM <= code <= _BOX_TO:
        return "-" if character in "─━┄┅┈┉═╌╍╴╶╸╺╼╾" else "|" if character in "│┃┆┇┊┋║╎╏╵╷╹╻╽╿" else "+"
    if _BRAILLE_FROM <= code <= _BRAILLE_TO:
        return " " if code == _BRAILLE_FROM else "."
    return "?" * cell_len(character)


class AsciiFilter(LineFilter):
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        line = "".join(segment.text for segment in segments)
        if line.isascii():
            return segments
        if _BAR.search(line):
            segments = list(_whole_cells(segments))
            line = "".join(segment.text for segment in segments)
        drawn = iter(line_in_ascii(line))
        return [
            Segment("".join(next(drawn) for _ in segment.text), segment.style, segment.control) for segment in segments
        ]


def _whole_cells(segments: list[Segment]) -> Iterator[Segment]:
    """Yield the segments of a line with the sections of its bars in whole cells, in proportion to their eighths of a cell."""
    cells = [(character, segment.style) for segment in segments for character in segment.text]
    line, at = "".join(character for character, _ in cells), 0
    for match in _BAR.finditer(line):
        yield from _joined(cells[at : match.start()])
        at = match.end()
        after, empty = next(iter(cells[at:]), (" ", None))
        after, plain = after if after == "▁" else " ", empty or Style()
        eighths = Counter[RichColor | None]()
        for character, style in cells[match.start() : at]:
            filled, style = _EIGHTHS.index(character) + 1, style or plain
            eighths[style.color] += filled
            if filled < 8 and style.bgcolor != plain.bgcolor:
                eighths[style.bgcolor] += 8 - filled
        eighths[None] = 8 * (match.end() - match.start()) - eighths.total()  # the empty part comes last
        counts = apportioned(list(eighths.values()), match.end() - match.start())
        for colour, count in zip(eighths, counts, strict=True):
            yield Segment("█" * count, plain + Style(color=colour)) if colour else Segment(after * count, plain)
    yield from _joined(cells[at:])


def _joined(cells: Iterable[tuple[str, Style | None]]) -> Iterator[Segment]:
    for style, same in groupby(cells, itemgetter(1)):
        yield Segment("".join(character for character, _ in same), style)


def line_in_ascii(line: str) -> list[str]:
    """Return each character of a line in ASCII. The line keeps its width: where one becomes `->`, a blank elsewhere becomes ""."""
    drawn = list(map(_in_ascii, line))
    for match in _RANGE.finditer(line):
        drawn[match.start() : match.end()] = "..."
    for index, character in enumerate(line):
        wider = _WIDER.get(character)
        neighbours = line[max(0, index - 1) : index] + line[index + 1 : index + 2]
        if wider is None or set(neighbours) & set(_ARROWS):
            continue  # arrows side by side are names of keys, which stay one character each
        blank = _spare_blank(drawn, index)
        if blank is not None:
            drawn[index], drawn[blank] = wider, ""
    return drawn


def _spare_blank(drawn: list[str], index: int) -> int | None:
    """Return the index of a blank that can be removed to make room for a second character at `index`, or None. The first choice is
    the nearest blank to the right in a gap of two or more, then one to the left, then a single blank next to `index`.
    """
    after, before = range(index + 1, len(drawn) - 1), range(index - 1, 0, -1)
    gaps = [blank for blank in after if drawn[blank] == drawn[blank + 1] == " "]
    gaps += [blank for blank in before if drawn[blank] == drawn[blank - 1] == " "]
    gaps += [blank for blank in (index + 1, index - 1) if 0 <= blank < len(drawn) and drawn[blank] == " "]
    return next(iter(gaps), None)
