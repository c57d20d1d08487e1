"""Translates a range such as `{0..15}` to a regular expression whose length depends only on the number of digits."""

from __future__ import annotations


def range_regex(first: int, last: int, width: int = 0) -> str:
    """Return a regular expression for the integers from `first` to `last` (in either order), zero-padded to `width` digits."""
    low, high = min(first, last), max(first, last)
    parts: list[str] = []
    if low < 0:
        parts += ["-" + part for part in _at_least_zero(max(-high, 1), -low, width - 1)]
    if high >= 0:
        parts += _at_least_zero(max(low, 0), high, width)
    return f"(?:{'|'.join(parts)})"


def _at_least_zero(low: int, high: int, width: int) -> list[str]:
    """Return regular expressions for the integers from `low` to `high` (0 <= low <= high), one for each number of digits. width:
    the number of digits to which they are zero-padded.
    """
    parts: list[str] = []
    shortest = max(len(str(low)), width)
    for digits in range(shortest, max(len(str(high)), width) + 1):
        first = str(low).zfill(digits) if digits == shortest else "1" + "0" * (digits - 1)
        last = str(high).zfill(digits) if digits >= len(str(high)) else "9" * digits
        parts.append(_same_length(first, last))
    return parts


def _same_length(low: str, high: str) -> str:
    if (set(low), set(high)) == ({"0"}, {"9"}):
        return f"[0-9]{{{len(low)}}}"
    if len(low) == 1:
        return f"[{low}-{high}]"
    choices = []
    for digit in map(str, range(int(low[0]), int(high[0]) + 1)):
        first = low[1:] if digit == low[0] else "0" * (len(low) - 1)
        last = high[1:] if digit == high[0] else "9" * (len(low) - 1)
        choices.append(digit + _same_length(first, last))
    return f"(?:{'|'.join(choices)})"
