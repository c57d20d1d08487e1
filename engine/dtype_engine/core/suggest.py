"""Suggests the known name that is nearest to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST = 200
"""Maximum length of a name that is compared. The time of a comparison grows with the square of the length."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name in `known` that is most similar to `word`, or None if none is similar enough (`cutoff`, by `difflib`)."""
    import difflib  # imported only when there is a mistake to correct

    if len(word) > _LONGEST:
        return None
    by_lower = {name.lower(): name for name in known if len(name) <= _LONGEST}
    found = difflib.get_close_matches(word.lower(), by_lower, 1, cutoff)
    return by_lower[found[0]] if found else None
