"""Suggests the known name that is nearest to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 200
"""Maximum length in characters of a name to compare. The time grows with the square of the length, and typed names are shorter."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `word`, or None if no similarity (0 to 1, as `difflib` defines it) reaches `cutoff`."""
    import difflib  # imported only when there is a mistake to correct

    if len(word) > _LONGEST:
        return None
    return next(
        iter(difflib.get_close_matches(word, [name for name in known if len(name) <= _LONGEST], 1, cutoff)), None
    )
