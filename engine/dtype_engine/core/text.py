"""Makes text from files and engines safe to show, so that it can't control the terminal or disturb the layout of the screen."""

from __future__ import annotations

import re
from typing import Annotated

EXACT = "exact"
Name = Annotated[str, EXACT]
"""A string that is copied unchanged from a file: a name in the model, or a pattern. It is compared with names in the tree, so
it is not escaped, and code that shows it must call `printable`. All other strings in events are safe to show.
"""

_INVISIBLE = re.compile(
    "[\u034f\u115f-\u11ff\u17b4\u17b5\u180b-\u180f\u3164\ud7b0-\ud7ff\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Matches characters that `str.isprintable` accepts although they have no width of their own: Unicode's
Default_Ignorable_Code_Point, and parts of the character before them, such as variation selectors. Terminals disagree on the
width of a line with them.
"""


def is_printable(text: str) -> bool:
    """Return whether a text has no control, text-direction or invisible characters. Line breaks are control characters."""
    return text.isprintable() and _INVISIBLE.search(text) is None


def printable(text: str, limit: int = 80) -> str:
    """Return `text` cut to `limit` characters, with all control, text-direction and invisible characters escaped."""
    clipped = text if len(text) <= limit else text[: limit - 1] + "…"
    if is_printable(clipped):
        return clipped
    return "".join(character if is_printable(character) else _escaped(character) for character in clipped)


def brief(head: str, *rows: tuple[str, str]) -> str:
    """Return the `repr` of a result: a line for its head, and one for each row (label, text) that has a text."""
    lines = (f"  {label:<7} {printable(text, 300)}" for label, text in rows if text)
    return "\n".join((printable(head, 300), *lines))


def without_controls(text: str) -> str:
    """Return the whole text with all control and text-direction characters escaped, except line breaks."""
    return "\n".join(printable(line, len(line)) for line in text.split("\n"))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
