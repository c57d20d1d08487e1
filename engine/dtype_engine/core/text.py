"""Text that comes from files: read with clear errors, and made safe to show. Names are text, never commands to the
terminal.
"""

from __future__ import annotations

import io
from pathlib import Path

from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular

_BIDIRECTIONAL = frozenset(map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def printable(text: str, limit: int = 80) -> str:
    """`text` with everything that could move the cursor or turn the writing around escaped, at most `limit`
    characters.
    """
    clipped = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(
        character if character.isprintable() and character not in _BIDIRECTIONAL else _escaped(character)
        for character in clipped
    )


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def read_text(path: Path) -> str:
    """A text file. Raises UserError that says what is wrong with it."""
    try:
        with open_regular(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8").read()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text (UTF-8)") from None
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text
