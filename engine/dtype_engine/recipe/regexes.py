"""Regular expressions that people and files give, matched within a time limit.

Python's `re` can need more than the age of the universe for one name, and can't be stopped. So `re` matches only what is
cheap by its look (few repeats and choices, none inside another repeat); everything else is matched by the `regex` package,
which keeps time. What an expression means is always what `re` says.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from dtype_engine.core.errors import PatternError, TooSlow

LONGEST_REGEX = 500
MOST_REPEATS = 1000
"""The largest number in `{...}` behind a part of an expression."""
_MOST_UNROLLED = 100_000
"""The largest product of such numbers: the compiler writes some of them out."""
_DEEPEST = 50
_ALONE_S = 2.0
"""For one match where no limit is in force."""
_CHEAP_STEPS = 300_000
"""Steps that `re` may need for one name, at worst: a few milliseconds."""

Anchored = Literal["fullmatch", "match", "search"]

_deadline: ContextVar[tuple[float, float] | None] = ContextVar("deadline", default=None)
_PIECES = re.compile(r"\\N\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let all the matching inside take so many seconds together, or fewer where such a limit is in force already."""
    ends = time.perf_counter() + seconds
    outer = _deadline.get()
    token = _deadline.set((ends, seconds) if outer is None or ends < outer[0] else outer)
    try:
        yield
    finally:
        _deadline.reset(token)


def compile_regex(
    source: str, shown: str, kind: Anchored = "fullmatch", before: int = 0, flags: re.RegexFlag = re.DOTALL
) -> Callable[[str], object]:
    """A function whose result is true for a name that matches; it raises TooSlow when that takes too long.

    `shown` is the pattern for messages, `before` the characters of it in front of `source`. Raises PatternError, with the
    position where one is to blame.
    """
    if len(source) > LONGEST_REGEX:
        raise PatternError(
            f"a regular expression of {len(source)} characters is too long: {LONGEST_REGEX} are the most; use several rules",
            before,
        )
    _check_parts(source, shown, before)
    _keep_time(shown)
    try:
        plain = re.compile(source, flags)
    except re.error as error:
        position = None if error.pos is None else error.pos + before
        raise PatternError(f"pattern {shortened(shown)}: {error.msg}", position) from None
    except (OverflowError, RecursionError, ValueError, MemoryError) as error:
        raise PatternError(f"pattern {shortened(shown)}: {error}", before) from None
    return limited(plain, shown, *_cost(source), kind)


def limited(
    plain: re.Pattern[str], shown: str, stars: int, choices: float, kind: Anchored = "fullmatch"
) -> Callable[[str], object]:
    """A matcher of a compiled expression with so many repeats without an end, and so many ways to choose among its parts."""
    cheap: Callable[[str], object] = getattr(plain, kind)
    if kind == "search":
        stars += 1
    if stars <= 1 and choices <= 100:
        return cheap
    longest = int((_CHEAP_STEPS / choices) ** (1 / stars)) if stars else (1 << 62) * (choices <= _CHEAP_STEPS)
    timed: list[Callable[..., Any]] = []

    def matches(name: str) -> bool:
        if len(name) < longest:
            _keep_time(shown)
            return cheap(name) is not None
        if not timed:
            timed.append(getattr(_timed(plain, shown), kind))
        try:
            return timed[0](name, timeout=_keep_time(shown), concurrent=False) is not None
        except (TimeoutError, MemoryError):
            raise _too_slow(shown) from None

    return matches


def _timed(plain: re.Pattern[str], shown: str) -> Any:
    import regex  # takes a while, and few need it

    try:
        dotall = regex.DOTALL if plain.flags & re.DOTALL else 0
        return regex.compile(_as_re_reads(plain.pattern), dotall | regex.VERSION0)
    except (regex.error, OverflowError, RecursionError, ValueError, MemoryError) as error:
        raise PatternError(f"pattern {shortened(shown)} can't be matched: {error}") from None


def _as_re_reads(source: str) -> str:
    """The expression for `regex`, to which a brace that counts nothing could mean an approximate match."""
    return "".join("\\{" if piece == "{" else piece for piece in (found[0] for found in _PIECES.finditer(source)))


def _keep_time(shown: str) -> float:
    """The seconds that are left. Raises TooSlow when there are none."""
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
        f"pattern {shortened(shown)} takes too long to match (over {seconds:g} s): simplify it, repeats inside repeats above all"
    )


def shortened(shown: str) -> str:
    """A pattern for a message."""
    return repr(shown if len(shown) <= 200 else shown[:199] + "…")


def _check_parts(source: str, shown: str, before: int) -> None:
    """Refuse what is expensive to compile: groups nested too deep, counts too large."""
    depth, unrolled = 0, 1
    for found in _PIECES.finditer(source):
        piece = found[0]
        depth += (piece == "(") - (piece == ")")
        numbers = re.findall(r"[0-9]+", piece) if piece[0] == "{" else []
        if any(len(number) > 4 or int(number) > MOST_REPEATS for number in numbers):
            raise PatternError(
                f"pattern {shortened(shown)}: {piece[:20]} repeats more than {MOST_REPEATS} times",
                before + found.start(),
            )
        unrolled *= max([1, *map(int, numbers)])
        if depth > _DEEPEST or unrolled > _MOST_UNROLLED:
            what = "groups are nested too deep" if depth > _DEEPEST else "it repeats too often"
            raise PatternError(f"pattern {shortened(shown)}: {what}", before + found.start())


def _cost(source: str) -> tuple[int, float]:
    """How many parts can repeat without an end, and at most how many choices there are between the others.

    Each repeat can end at any place of a name, so matching takes at most about (length ** repeats) * choices steps, unless a
    repeat is inside another or looks back; then it has no such bound.
    """
    pieces = [found[0] for found in _PIECES.finditer(source)]
    stars, bars, groups, choices = 0, 0, 1, 1.0
    for index, piece in enumerate(pieces):
        previous = pieces[index - 1] if index else ""
        counted = piece[0] == "{" and len(piece) > 2
        if previous == ")" and (piece in "*+?" or counted):
            return 99, float("inf")
        if (piece[0] == "\\" and piece[1].isdigit()) or (piece == "=" and previous == "P"):
            return 99, float("inf")
        if counted or piece in "*+":
            stars += previous not in "*+?" or not previous
        elif piece == "?" and previous == "(":
            if "".join(pieces[index : index + 2]) != "?:" and pieces[index + 1 : index + 2] != ["P"]:
                return 99, float("inf")
        elif piece == "?" and previous and previous not in "*+?" and previous[0] != "{":
            choices *= 2
        bars += piece == "|"
        groups += piece == "("
    return stars, choices * (1 + bars / groups) ** groups
