"""For terminals and fonts without Unicode: every character that is drawn becomes one ASCII character of the same width.

The filter runs after all drawing, so no widget needs to know of it. What is not in the table shows as `?`.
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
    "▾": "v", "▸": ">", "❯": ">", "•": "*", "›": ">", "→": ">", "←": "<", "↑": "^", "↓": "v", "·": ".", "…": "~", "×": "x",
    "Δ": "d", "±": "+", "≥": ">", "≤": "<", "²": "2", "√": "V", "Σ": "S", "‖": "|", "⚠": "!", "✓": "+", "✗": "x", "⟦": "[",
    "⟧": "]", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "\xa0": " ", "█": "#", "▓": "%", "▒": "=",
    "░": "-", "▏": " ", "▎": " ", "▍": "-", "▌": "-", "▋": "=", "▊": "=", "▉": "#", "▀": '"', "▄": "_", "▐": "|", "▔": "-",
    "▁": "_", "▂": "_", "▃": "_", "▅": "=", "▆": "=", "▇": "#", "■": "#", "□": "o", "●": "o", "○": "o", "◆": "*", "◇": "*",
    "▲": "^", "▼": "v", "∞": "8", "≈": "~",
}  # fmt: skip
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
def in_ascii(text: str) -> str:
    """`text` in as many cells, ASCII only."""
    return text if text.isascii() else "".join(map(_in_ascii, text))


def _in_ascii(character: str) -> str:
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
    """Draws every line in ASCII."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.text.isascii() else Segment(in_ascii(segment.text), segment.style, segment.control)
            for segment in segments
        ]
