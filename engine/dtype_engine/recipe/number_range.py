"""`{0..15}` as a regular expression that grows with the digits of its ends, not with the numbers between them."""

from __future__ import annotations


def range_regex(first: int, last: int, width: int = 0) -> str:
    """An expression for just the numbers from `first` to `last`, in either order, as `f"{number:0{width}d}"` writes them."""
    low, high = min(first, last), max(first, last)
    parts: list[str] = []
    if low < 0:
        parts += ["-" + part for part in _at_least_zero(max(-high, 1), -low, width - 1)]
    if high >= 0:
        parts += _at_least_zero(max(low, 0), high, width)
    return f"(?:{'|'.join(parts)})"


def _at_least_zero(low: int, high: int, width: int) -> list[str]:
    """Expressions for the numbers from `low` to `high`, one for each count of digits."""
    parts: list[str] = []
    shortest = max(len(str(low)), width)
    for digits in range(shortest, max(len(str(high)), width) + 1):
        first = str(low).zfill(digits) if digits == shortest else "1" + "0" * (digits - 1)
        last = str(high).zfill(digits) if digits >= len(str(high)) else "9" * digits
        parts.append(_same_length(first, last))
    return parts


def _same_length(low: str, high: str) -> str:
    """An expression for the numbers between two of the same number of digits, both included."""
    if low == high:
        return low
    if len(low) == 1:
        return f"[{low}-{high}]"
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    choices: list[str] = []
    if low[1:] != "0" * rest:
        choices.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    upper = None
    if high[1:] != "9" * rest:
        upper = high[0] + _same_length("0" * rest, high[1:])
        last -= 1
    if first <= last:
        anything = "[0-9]" if rest == 1 else f"[0-9]{{{rest}}}"
        choices.append((str(first) if first == last else f"[{first}-{last}]") + anything)
    if upper is not None:
        choices.append(upper)
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
