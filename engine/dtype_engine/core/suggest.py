"""The name that somebody meant."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 200
"""Characters. The comparison takes their square in time, and no name that was mistyped is as long."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `word`; None where none has at least `cutoff` (0 to 1) of it in common."""
    import difflib  # only a mistake needs it

    if len(word) > _LONGEST:
        return None
    return next(
        iter(difflib.get_close_matches(word, [name for name in known if len(name) <= _LONGEST], 1, cutoff)), None
    )
