"""Makes text from files safe to show, so that it can't send control sequences to the terminal."""

from __future__ import annotations

_BIDIRECTIONAL = frozenset(map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))

_INVISIBLE = frozenset("\u115f\u1160\u3164\uffa0")
"""Hangul fillers: letters by their category, but nothing is drawn for them, so two names could look the same."""
_ESCAPED = _BIDIRECTIONAL | _INVISIBLE


def printable(text: str, limit: int = 80) -> str:
    """Return `text` cut to `limit` characters, with all control, text-direction and invisible characters escaped."""
    clipped = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(
        character if character.isprintable() and character not in _ESCAPED else _escaped(character)
        for character in clipped
    )


def without_controls(text: str) -> str:
    """Return the whole text with all control and text-direction characters escaped, except line breaks."""
    return "\n".join(printable(line, len(line)) for line in text.split("\n"))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
