"""The pattern language: which tensors a rule means.

    model.layers.3.mlp          a module and everything below it, or one tensor
    *.mlp                       a glob as `fnmatch` has it: `*` crosses dots, `?`, `[0-9]`, `[!q]`
    model.layers.{0..7}.mlp     a range; {00..07} keeps its zeros
    *.{q,k,v}_proj              choices, which may hold globs and braces themselves
    re:.*\\.(gate|up)_proj       a regular expression of the `regex` package, over the whole name
    type:LayerNorm, type:*Norm  modules by class

A pattern takes a tensor when it matches the tensor's own name or the name of a module above it. Names are
matched whole, so `model.layers.1` never means `model.layers.10`.

The globs are ours and not wcmatch's with bracex: an error here has its position in the pattern, `{0..7}` is one alternation and not
a product of patterns, and what a pattern may cost is bounded. Property tests hold the globs to `fnmatch`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod

from dtype_engine.core.errors import PatternError
from dtype_engine.core.tree import ancestors, numbered_parts
from dtype_engine.recipe.number_range import range_regex
from dtype_engine.recipe.regexes import compile_regex, limited, shortened

_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
_LONGEST_RANGE = 100_000
_LONGEST_NUMBER = 40
_LONGEST = 200_000
_LONGEST_WITH_BRACES = 20_000
_NAMELESS = "\0"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern; make one with `compile_pattern`.

    All that asks whether it matches raises TooSlow where that takes too long: see `regexes.time_limit`.
    """

    text: str
    by_class: bool
    _matches: Callable[[str], object] = field(compare=False, repr=False)

    def matches(self, name: str) -> bool:
        """Whether it matches this one dotted name, of a tensor or of a module."""
        return not self.by_class and bool(self._matches(name))

    def matches_class(self, class_name: str | None) -> bool:
        """Whether it means modules of this class."""
        return self.by_class and class_name is not None and bool(self._matches(class_name))

    def takes(self, tensor: str) -> bool:
        """Whether it matches a tensor's own name or a module above it, by name alone."""
        return self.matches(tensor) or any(self.matches(module) for module in ancestors(tensor) if module)

    def matches_exactly(self, tensor: str) -> bool:
        """Whether it names this very tensor rather than whatever stands in its module.

        Non-persistent buffers follow only rules that do. `*.inv_freq` singles a buffer out, `*` and
        `model.rotary_emb.*` do not: they would match any other name in its place as well.
        """
        parent, dot, _ = tensor.rpartition(".")
        return self.matches(tensor) and not self.matches(parent + dot + _NAMELESS)


@lru_cache(maxsize=512)
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern. Raises PatternError, with the position where one is to blame."""
    text = text.strip()
    if text in ("", "re:", "type:"):
        raise PatternError("the pattern is empty: write a module or tensor name, a glob, re:… or type:…", 0)
    if text.startswith("re:"):
        return Pattern(text, False, compile_regex(text[3:], text, before=3))
    longest = _LONGEST_WITH_BRACES if "{" in text else _LONGEST
    if len(text) > longest:
        raise PatternError(f"a pattern of {len(text)} characters is too long: {longest} are the most", longest)
    by_class = text.startswith("type:")
    piece, end = _sequence(text, 5 if by_class else 0, depth=0)
    if end < len(text):
        raise PatternError(f"pattern {shortened(text)}: '}}' without '{{' at {end + 1}", end)
    if piece.stars <= 1 and piece.choices <= 100:  # at most a hundred steps for a character of a name: needs no clock
        return Pattern(text, by_class, re.compile(piece.source, re.DOTALL).fullmatch)
    return Pattern(text, by_class, limited(piece.source, text))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a glob as a regular expression.

    length: of all that it matches, in characters, None where that differs. stars: parts that can take any number of
    characters and be tried again with another. choices: ways to choose among the rest, at most.
    """

    source: str
    length: int | None
    stars: int = 0
    choices: float = 1.0


_STAR = _Piece(".*", None, 1)


def _sequence(text: str, at: int, depth: int) -> tuple[_Piece, int]:
    """Translate up to the end of the text or, inside braces, up to the `,` or `}` that ends this choice."""
    pieces: list[_Piece] = []
    while at < len(text):
        character = text[at]
        if character == "}" or (character == "," and depth):
            break
        if character == "{":
            piece, at = _braces(text, at, depth + 1)
            pieces.append(piece)
            continue
        if character == "[" and (end := _class_end(text, at)) is not None:
            pieces.append(_Piece(_character_class(text[at + 1 : end]), 1))
            at = end + 1
            continue
        if character != "*":
            pieces.append(_Piece("." if character == "?" else re.escape(character), 1))
        elif not pieces or pieces[-1] is not _STAR:
            pieces.append(_STAR)
        at += 1
    return _joined(pieces, whole=depth == 0), at


def _joined(pieces: list[_Piece], whole: bool) -> _Piece:
    """One piece after the other; `whole` when they are all of the pattern.

    What stands between two stars is looked for from left to right and stays where it was found first: no later place could
    be better, as long as it has one length. So `*a*a*a*b` takes as many steps as a name has characters, and not their fourth
    power. (What `fnmatch` does as well.)
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
            source += f"(?>.*?{inside})"  # not tried again, once it has matched
    source += "".join(piece.source for piece in pieces[stars[-1] :])
    return _Piece(source, None, again + 1, choices)


def _braces(text: str, opened: int, depth: int) -> tuple[_Piece, int]:
    """`{a,b}` or `{0..7}` at `opened`; answer the expression and where to go on."""
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
    return (
        _Piece(
            source,
            lengths.pop() if len(lengths) == 1 else None,
            max(choice.stars for choice in choices),
            sum(choice.choices for choice in choices),
        ),
        at + 1,
    )


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
    return _Piece(range_regex(first, last, width), lengths.pop() if len(lengths) == 1 else None, 0, len(found[2]) + 1)


def _class_end(text: str, opened: int) -> int | None:
    """Where `[...]` closes, or None: then the bracket is a character like any other, as in `fnmatch`."""
    at = opened + 1
    if text[at : at + 1] == "!":
        at += 1
    if text[at : at + 1] == "]":
        at += 1
    end = text.find("]", at)
    return end if end >= 0 else None


def _character_class(inside: str) -> str:
    negated = inside.startswith("!")
    members = inside[1:] if negated else inside
    pieces: list[str] = []
    at = 0
    while at < len(members):
        if at + 2 < len(members) and members[at + 1] == "-":
            low, high = members[at], members[at + 2]
            if low <= high:
                pieces.append(f"{re.escape(low)}-{re.escape(high)}")
            at += 3
        else:
            pieces.append(re.escape(members[at]))
            at += 1
    if not pieces:  # only reversed ranges: nothing can match, or, negated, anything does
        return "." if negated else "(?!)"
    return f"[{'^' if negated else ''}{''.join(pieces)}]"


def generalisations(name: str, class_name: str | None = None) -> list[str]:
    """Patterns for a node, from itself alone to its kind: what Tab walks through in the cast prompt.

    `model.layers.3.mlp` gives itself, `model.layers.*.mlp`, `*.mlp` and, its class known, `type:LlamaMLP`.
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
    tails = range(tail_start, len(parts)) if tail_start < len(parts) else range(0)
    steps += ["*." + ".".join(_literal(part) for part in parts[start:]) for start in tails]
    if class_name:
        steps.append(f"type:{class_name}")
    return list(dict.fromkeys(steps))


def _literal(name: str) -> str:
    """A name with the characters that mean something in a pattern put in brackets."""
    return re.sub(r"[*?\[{},]", lambda found: f"[{found[0]}]", name) if re.search(r"[*?\[{}]", name) else name
