"""For terminals and fonts without Unicode: every line that is drawn becomes one of the same width in ASCII.

The filter runs after all drawing, so no widget needs to know of it. A sign whose one ASCII character would say something else
(`a > b` for `a → b`) is written with two, and a blank of the line makes room for it. What is in no table shows as `?`.
"""

from __future__ import annotations

import locale
import os
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_SAME_WIDTH = {
    "▾": "v", "▸": ">", "❯": ">", "•": "*", "›": ">", "‹": "<", "→": ">", "←": "<", "↑": "^", "↓": "v", "·": ".",
    "…": "~", "×": "x", "⏎": "$", "Δ": "d", "±": "+", "≥": ">", "≤": "<", "²": "2", "√": "V", "Σ": "S", "‖": "|",
    "⚠": "!", "✓": "+", "✗": "x", "⟦": "[", "⟧": "]", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"',
    "\xa0": " ", "█": "#", "▓": "%", "▒": "=", "░": "-", "▏": " ", "▎": " ", "▍": "-", "▌": "-", "▋": "=", "▊": "=",
    "▉": "#", "▀": '"', "▄": "_", "▐": "|", "▔": "-", "▁": "_", "▂": "_", "▃": "_", "▅": "=", "▆": "=", "▇": "#",
    "■": "#", "□": "o", "●": "o", "○": "o", "◆": "*", "◇": "*", "▲": "^", "▼": "v", "∞": "!", "≈": "~",
}  # fmt: skip
_WIDER = {"→": "->", "←": "<-", "±": "+-", "≥": ">=", "≤": "<="}
_ARROWS = "←↑→↓"
_BOX_FROM, _BOX_TO = 0x2500, 0x257F
_BRAILLE_FROM, _BRAILLE_TO = 0x2800, 0x28FF


def wants_ascii(setting: str) -> bool:
    """Whether to draw in ASCII: `always`, `never`, or `auto`: where the locale's encoding is not UTF-8."""
    if setting != "auto":
        return setting == "always"
    locale_name = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    if locale_name:
        return "utf-8" not in locale_name.lower() and "utf8" not in locale_name.lower()
    return locale.getpreferredencoding(False).lower().replace("-", "") != "utf8"


@lru_cache(4096)
def _in_ascii(character: str) -> str:
    """A character in as many cells, ASCII only."""
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
        drawn = iter(line_in_ascii(line))
        return [
            Segment("".join(next(drawn) for _ in segment.text), segment.style, segment.control) for segment in segments
        ]


def line_in_ascii(line: str) -> list[str]:
    """What to draw for each character of a line, in as many cells, ASCII only: nothing for a blank that a longer sign takes."""
    drawn = list(map(_in_ascii, line))
    for index, character in enumerate(line):
        wider = _WIDER.get(character)
        beside = line[max(0, index - 1) : index] + line[index + 1 : index + 2]
        if wider is None or set(beside) & set(_ARROWS):
            continue  # arrows side by side are keys
        blank = _spare_blank(drawn, index)
        if blank is not None:
            drawn[index], drawn[blank] = wider, ""
    return drawn


def _spare_blank(drawn: list[str], index: int) -> int | None:
    """Of a gap of two or more, the nearest at the right, else at the left; else a blank beside it. None where there is none."""
    after, before = range(index + 1, len(drawn) - 1), range(index - 1, 0, -1)
    gaps = [blank for blank in after if drawn[blank] == drawn[blank + 1] == " "]
    gaps += [blank for blank in before if drawn[blank] == drawn[blank - 1] == " "]
    gaps += [blank for blank in (index + 1, index - 1) if 0 <= blank < len(drawn) and drawn[blank] == " "]
    return next(iter(gaps), None)
