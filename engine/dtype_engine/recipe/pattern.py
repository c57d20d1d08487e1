"""The pattern language, which says which tensors a rule selects.

    model.layers.3.mlp          a module and everything below it, or one tensor
    model.*.mlp                 a glob as `fnmatch` has it: `*` crosses dots, `?`, `[0-9]`, `[!q]`
    *.mlp                       a glob that begins with `*.` also matches without it: `mlp` at the top level matches, too
    model.layers.{0..7}.mlp     a range; {00..07} keeps its zeros
    *.{q,k,v}_proj              alternatives, which may contain globs and braces
    re:.*\\.(gate|up)_proj       a regular expression of the `regex` package, over the whole name
    type:LayerNorm, type:*Norm  modules by class

A pattern selects a tensor if it matches the tensor's own name or the name of a module above it. It must match the whole name, so
`model.layers.1` never matches `model.layers.10`.

Globs are translated here and not by wcmatch and bracex: errors have a position in the pattern, `{0..7}` becomes one alternation and
not eight patterns, and the cost of a pattern is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod

import msgspec

from dtype_engine.core.errors import PatternError
from dtype_engine.core.regexes import compile_regex, limited, shortened
from dtype_engine.core.tree import ancestors, numbered_parts

_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
_ANYWHERE = re.compile(r"\*+\.")
_LONGEST_RANGE = 100_000
_LONGEST_NUMBER = 40
_LONGEST = 200_000
_LONGEST_WITH_BRACES = 20_000
_NAMELESS = "\0"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. Every method that matches raises TooSlow if matching exceeds the limit of `regexes.time_limit`."""

    text: str
    by_class: bool
    _matches: Callable[[str], object] = field(compare=False, repr=False)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the dotted name of a tensor or module. False if the pattern selects by class."""
        return not self.by_class and bool(self._matches(name))

    def matches_class(self, class_name: str | None) -> bool:
        """Return whether the pattern selects modules by class, as `type:*Norm` does, and matches this class."""
        return self.by_class and class_name is not None and bool(self._matches(class_name))

    def selects(self, tensor: str) -> bool:
        """Return whether the pattern matches a tensor's own name or the name of a module above it. Classes are not considered."""
        return self.matches(tensor) or any(self.matches(module) for module in ancestors(tensor) if module)

    def matches_exactly(self, tensor: str) -> bool:
        """Return whether the pattern matches this tensor, and would not match any other name in the same module.

        Only such patterns apply to non-persistent buffers: `*.inv_freq` does, but `*` and `model.rotary_emb.*` do not.
        """
        parent, dot, _ = tensor.rpartition(".")
        return self.matches(tensor) and not self.matches(parent + dot + _NAMELESS)


@lru_cache(maxsize=512)
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern. Raises PatternError, with the position of the error if it is known."""
    text = text.strip()
    if text in ("", "re:", "type:"):
        raise PatternError("the pattern is empty: write a module or tensor name, a glob, re:… or type:…", 0)
    if text.startswith("re:"):
        return Pattern(text, False, compile_regex(text[3:], text, before=3))
    if len(text) > (longest := _LONGEST_WITH_BRACES if "{" in text else _LONGEST):
        raise PatternError(f"a pattern of {len(text)} characters is too long: the limit is {longest}", longest)
    by_class = text.startswith("type:")
    piece, end = _sequence(text, 5 if by_class else 0, depth=0)
    if end < len(text):
        raise PatternError(f"pattern {shortened(text)}: '}}' without '{{' at {end + 1}", end)
    matches: Callable[[str], object]
    if piece.stars <= 1 and piece.choices <= 100:
        # At most 100 steps per character of a name, so no time limit is needed.
        matches = re.compile(piece.source, re.DOTALL).fullmatch
    else:
        matches = limited(piece.source, text)
    if _ANYWHERE.match(text):
        return Pattern(text, by_class, lambda name: matches(f".{name}"))
    return Pattern(text, by_class, matches)


class _Piece(msgspec.Struct, frozen=True):
    """A part of a glob, such as `*` or `{a,b}`, translated to a regular expression."""

    source: str
    length: int | None
    """Number of characters of every text that the piece matches, or None if such texts differ in length."""
    stars: int = 0
    """Number of `*` wildcards. Each of them makes matching slower."""
    choices: float = 1.0
    """An upper bound on the number of texts that the piece's braces can stand for: 6 for `{a,b}{c,d,e}`."""


_STAR = _Piece(".*", None, 1)


def _sequence(text: str, at: int, depth: int) -> tuple[_Piece, int]:
    """Translate the part of a glob that begins at index `at`, up to the end or, inside braces, to the next `,` or `}`.

    Returns (the translation, the index at which the part ends). depth: how many braces are open at `at`.
    """
    pieces: list[_Piece] = []
    while at < len(text):
        character = text[at]
        if character == "}" or (character == "," and depth):
            break
        if character == "{":
            piece, at = _braces(text, at, depth + 1)
        elif character == "[" and (end := _class_end(text, at)) is not None:
            piece, at = _Piece(_character_class(text[at + 1 : end]), 1), end + 1
        elif character == "*":
            piece, at = _STAR, at + 1
        else:
            piece, at = _Piece("." if character == "?" else re.escape(character), 1), at + 1
        if not (piece is _STAR and pieces and pieces[-1] is _STAR):
            pieces.append(piece)
    return _concatenated(pieces, whole=depth == 0), at


def _concatenated(pieces: list[_Piece], whole: bool) -> _Piece:
    """Return one regular expression for translated pieces of a glob. whole: whether they are the entire glob.

    In an entire glob, the text between two stars is matched only at its first occurrence in a name, because a later occurrence
    would leave less of the name for the rest of the glob. Without backtracking, the time for `*a*a*a*b` grows with the length of
    the name, and not with its fourth power. This does not apply to texts of varying length, such as `{a,bc}`.
    """
    stars = [index for index, piece in enumerate(pieces) if piece is _STAR]
    lengths = [piece.length for piece in pieces]
    length = sum(known) if len(known := [one for one in lengths if one is not None]) == len(lengths) else None
    choices = prod(piece.choices for piece in pieces)
    if not whole or len(stars) < 2:
        return _Piece("".join(piece.source for piece in pieces), length, sum(piece.stars for piece in pieces), choices)
    source = "".join(piece.source for piece in pieces[: stars[0]])
    again = sum(piece.stars for piece in pieces if piece is not _STAR)
    for opened, closed in pairwise(stars):
        inside = "".join(piece.source for piece in pieces[opened + 1 : closed])
        if None in lengths[opened + 1 : closed]:
            source, again = f"{source}.*{inside}", again + 1
        else:
            source += f"(?>.*?{inside})"  # an atomic group: the matcher never backtracks into it
    source += "".join(piece.source for piece in pieces[stars[-1] :])
    return _Piece(source, None, again + 1, choices)


def _braces(text: str, opened: int, depth: int) -> tuple[_Piece, int]:
    """Translate the braces `{a,b}` or `{0..7}` of a glob, which begin at the index `opened`.

    Returns (the translation, the index after the closing brace). depth: the number of open braces, including this one.
    """
    if depth > 20:
        raise PatternError(f"pattern {shortened(text)}: braces are nested too deep at {opened + 1}", opened)
    ranged = _RANGE.match(text, opened + 1)
    if ranged and text[ranged.end() : ranged.end() + 1] == "}":
        return _number_range(text, opened, ranged), ranged.end() + 1
    choices: list[_Piece] = []
    at = opened
    while True:
        choice, at = _sequence(text, at + 1, depth)
        choices.append(choice)
        if at >= len(text):
            raise PatternError(f"pattern {shortened(text)}: '{{' at {opened + 1} is never closed", opened)
        if text[at] == "}":
            break
    source = f"(?:{'|'.join(choice.source for choice in choices)})"
    lengths = {choice.length for choice in choices}
    stars, texts = max(choice.stars for choice in choices), sum(choice.choices for choice in choices)
    return _Piece(source, lengths.pop() if len(lengths) == 1 else None, stars, texts), at + 1


def _number_range(text: str, opened: int, found: re.Match[str]) -> _Piece:
    if max(map(len, found.groups())) > _LONGEST_NUMBER:
        raise PatternError(f"pattern {shortened(text)}: the numbers at {opened + 1} have too many digits", opened)
    first, last = int(found[1]), int(found[2])
    if abs(last - first) > _LONGEST_RANGE:
        raise PatternError(
            f"pattern {shortened(text)}: the range at {opened + 1} has over {_LONGEST_RANGE} numbers", opened
        )
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-").startswith("0") for end in found.groups())
    width = max(len(found[1]), len(found[2])) if padded else 0
    lengths = {len(f"{number:0{width}d}") for number in (first, last, *([0] if first * last < 0 else []))}
    return _Piece(_range_regex(first, last, width), lengths.pop() if len(lengths) == 1 else None, 0, len(found[2]) + 1)


def _range_regex(first: int, last: int, width: int = 0) -> str:
    """Return a regular expression for the integers from `first` to `last` (in either order), zero-padded to `width` digits."""
    low, high = min(first, last), max(first, last)
    parts: list[str] = []
    if low < 0:
        parts += ["-" + part for part in _at_least_zero(max(-high, 1), -low, width - 1)]
    if high >= 0:
        parts += _at_least_zero(max(low, 0), high, width)
    return f"(?:{'|'.join(parts)})"


def _at_least_zero(low: int, high: int, width: int) -> list[str]:
    """Return regular expressions for the integers from `low` to `high` (0 <= low <= high), one for each number of digits."""
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


def _class_end(text: str, opened: int) -> int | None:
    """Return the index of the `]` that closes a character class such as `[0-9]`, or None if there is none."""
    at = opened + 1
    if text[at : at + 1] == "!":
        at += 1
    if text[at : at + 1] == "]":
        at += 1
    end = text.find("]", at)
    return end if end >= 0 else None


def _character_class(inside: str) -> str:
    negated, members = inside.startswith("!"), inside.removeprefix("!")
    pieces: list[str] = []
    for low, high, single in re.findall(r"(?s)(.)-(.)|(.)", members):
        if single:
            pieces.append(re.escape(single))
        elif low <= high:
            pieces.append(f"{re.escape(low)}-{re.escape(high)}")
    if not pieces:  # all ranges are reversed: nothing matches, or any character does if the class is negated
        return "." if negated else "(?!)"
    return f"[{'^' if negated else ''}{''.join(pieces)}]"


def generalisations(name: str, class_name: str | None = None) -> list[str]:
    """Return patterns for a node from the most specific to the most general: for `model.layers.3.mlp`, itself,
    `model.layers.*.mlp`, `*.mlp` and, if its class is known, `type:LlamaMLP`.
    """
    if not name:
        return ["*"] + ([f"type:{class_name}"] if class_name else [])
    steps = [_literal(name)]
    parts = name.split(".")
    numbered = numbered_parts(name)
    for keep_from in reversed(range(len(numbered))):
        starred = set(numbered[keep_from:])
        steps.append(".".join("*" if index in starred else _literal(part) for index, part in enumerate(parts)))
    tail_start = numbered[-1] + 1 if numbered else 1
    steps += ["*." + ".".join(map(_literal, parts[start:])) for start in range(tail_start, len(parts))]
    if class_name:
        steps.append(f"type:{class_name}")
    return list(dict.fromkeys(steps))


def _literal(name: str) -> str:
    return re.sub(r"[*?\[{},]", lambda found: f"[{found[0]}]", name) if re.search(r"[*?\[{}]", name) else name
