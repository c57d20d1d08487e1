"""Compiles regular expressions from users and files, and matches them within a time limit.

The `regex` package is used because a match of Python's `re` can't be interrupted, and its time can grow exponentially.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Literal

from dtype_engine.core.errors import PatternError, TooSlow

LONGEST_REGEX = 500
MOST_REPEATS = 1000
"""Maximum repeat count in a regular expression of a user, as in `a{100}`."""
_MOST_UNROLLED = 100_000
"""Maximum product of all repeat counts. The compiler unrolls some repeats, which could need gigabytes."""
_ALONE_S = 2.0
"""Time limit in seconds for a match outside of a `time_limit` block."""
_COUNTS = re.compile(r"\{(?:[0-9]*,)?([0-9]+)\}|\{([0-9]+),\}")

Anchored = Literal["fullmatch", "match", "search"]

_deadline: ContextVar[tuple[float, float] | None] = ContextVar("deadline", default=None)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context manager that limits the total time of all matching in its block. Limits of enclosing blocks hold, too."""
    ends = time.perf_counter() + seconds
    outer = _deadline.get()
    token = _deadline.set((ends, seconds) if outer is None or ends < outer[0] else outer)
    try:
        yield
    finally:
        _deadline.reset(token)


def compile_regex(
    source: str,
    shown: str,
    kind: Anchored = "fullmatch",
    before: int = 0,
    dotall: bool = True,
    longest: int = LONGEST_REGEX,
) -> Callable[[str], bool]:
    """Compile a regular expression to a function that returns whether a name matches, and raises TooSlow if that takes too long.

    shown: the user's whole pattern, for messages. kind: how much of a name must match. before: index of `source` in `shown`.
    dotall: whether `.` matches line breaks. longest: the most characters. Raises PatternError, with the position of the error if it
    is known.
    """
    if len(source) > longest:
        raise PatternError(
            f"a regular expression of {len(source)} characters is too long: the limit is {longest}; use several rules",
            before,
        )
    counts = [(found.start() + before, found[0], found[1] or found[2]) for found in _COUNTS.finditer(source)]
    for position, written, number in counts:
        if len(number) > 4 or int(number) > MOST_REPEATS:
            raise PatternError(
                f"pattern {shortened(shown)}: {written[:20]} repeats more than {MOST_REPEATS} times", position
            )
    if prod(max(1, int(number)) for _, _, number in counts) > _MOST_UNROLLED:
        raise PatternError(f"pattern {shortened(shown)}: it repeats too often", counts[-1][0])
    return limited(source, shown, kind, before, dotall)


def limited(
    source: str, shown: str, kind: Anchored = "fullmatch", before: int = 0, dotall: bool = True
) -> Callable[[str], bool]:
    """Compile a regular expression as `compile_regex` does, but without limits on length and repeat counts: for expressions that
    are cheap to compile. Raises PatternError.
    """
    import regex  # the import takes 10 ms, and few recipes need it

    _seconds_left(shown)
    try:
        compiled = regex.compile(source, regex.DOTALL if dotall else 0)
    except regex.error as error:
        position = None if error.pos is None else error.pos + before
        raise PatternError(f"pattern {shortened(shown)}: {error.msg}", position) from None
    except RecursionError:
        raise PatternError(f"pattern {shortened(shown)}: groups are nested too deep", before) from None
    except (OverflowError, ValueError, MemoryError) as error:
        raise PatternError(f"pattern {shortened(shown)}: {error}", before) from None
    match = getattr(compiled, kind)

    def matches(name: str) -> bool:
        try:
            return match(name, timeout=_seconds_left(shown), concurrent=False) is not None
        except (TimeoutError, MemoryError):
            raise _too_slow(shown) from None

    return matches


def _seconds_left(shown: str) -> float:
    limit = _deadline.get()
    if limit is None:
        return _ALONE_S
    left = limit[0] - time.perf_counter()
    if left <= 0:
        raise _too_slow(shown)
    return left


def _too_slow(shown: str) -> TooSlow:
    limit = _deadline.get()
    seconds = limit[1] if limit is not None else _ALONE_S
    return TooSlow(
        f"pattern {shortened(shown)} takes too long to match (over {seconds:g} s): simplify it, especially repeats inside repeats"
    )


def shortened(shown: str) -> str:
    """Return a pattern in quotes for a message, cut to 200 characters."""
    return repr(shown if len(shown) <= 200 else shown[:199] + "…")
