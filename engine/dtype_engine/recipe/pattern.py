"""The pattern language: which tensors a rule means.

    model.layers.3.mlp          a module and everything below it, or one tensor
    *.mlp                       a glob as `fnmatch` has it: `*` crosses dots, `?`, `[0-9]`, `[!q]`
    model.layers.{0..7}.mlp     a range; {00..07} keeps its zeros
    *.{q,k,v}_proj              choices, which may hold globs and braces themselves
    re:.*\\.(gate|up)_proj       a regular expression, over the whole name
    type:LayerNorm, type:*Norm  modules by class

A pattern takes a tensor when it matches the tensor's own name or the name of a module above it. Names are
matched whole, so `model.layers.1` never means `model.layers.10`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ..errors import PatternError
from ..tree import ancestors

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_LONGEST_RANGE = 100_000
_NAMELESS = "\0"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern; make one with `compile_pattern`."""

    text: str
    by_class: bool
    regex: re.Pattern[str]

    def matches(self, name: str) -> bool:
        """Whether it matches this one dotted name, of a tensor or of a module."""
        return not self.by_class and self.regex.fullmatch(name) is not None

    def matches_class(self, class_name: str | None) -> bool:
        """Whether it means modules of this class."""
        return self.by_class and class_name is not None and self.regex.fullmatch(class_name) is not None

    def takes(self, tensor: str) -> bool:
        """Whether it matches a tensor's own name or a module above it, by name alone."""
        return self.matches(tensor) or any(self.matches(module) for module in ancestors(tensor) if module)

    def singles_out(self, tensor: str) -> bool:
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
    if text.startswith("re:"):
        source, by_class = text[3:], False
    elif text.startswith("type:"):
        source, by_class = _translate(text, 5), True
    else:
        source, by_class = _translate(text, 0), False
    if not source:
        raise PatternError("the pattern is empty: write a module or tensor name, a glob, re:… or type:…", 0)
    try:
        return Pattern(text, by_class, re.compile(source, re.DOTALL))
    except re.error as error:
        raise PatternError(f"pattern {text!r}: {error.msg}", None if error.pos is None else error.pos + 3) from None


def _translate(text: str, start: int) -> str:
    """A glob with braces, from `start` on, as a regular expression."""
    source, end = _sequence(text, start, depth=0)
    if end < len(text):
        raise PatternError(f"pattern {text!r}: '}}' without '{{' at {end + 1}", end)
    return source


def _sequence(text: str, at: int, depth: int) -> tuple[str, int]:
    """Translate up to the end of the text or, inside braces, up to the `,` or `}` that ends this choice."""
    parts: list[str] = []
    while at < len(text):
        character = text[at]
        if character == "}" or (character == "," and depth):
            break
        if character == "{":
            part, at = _braces(text, at, depth + 1)
            parts.append(part)
            continue
        if character == "[" and (end := _class_end(text, at)) is not None:
            parts.append(_character_class(text[at + 1 : end]))
            at = end + 1
            continue
        parts.append({"*": ".*", "?": "."}.get(character) or re.escape(character))
        at += 1
    return "".join(parts), at


def _braces(text: str, opened: int, depth: int) -> tuple[str, int]:
    """`{a,b}` or `{0..7}` at `opened`; answer the expression and where to go on."""
    if depth > 20:
        raise PatternError(f"pattern {text!r}: braces are nested too deep at {opened + 1}", opened)
    ranged = _RANGE.match(text, opened + 1)
    if ranged and text[ranged.end() : ranged.end() + 1] == "}":
        return _number_range(text, opened, ranged), ranged.end() + 1
    choices: list[str] = []
    at = opened
    while True:
        choice, at = _sequence(text, at + 1, depth)
        choices.append(choice)
        if at >= len(text):
            raise PatternError(f"pattern {text!r}: '{{' at {opened + 1} is never closed", opened)
        if text[at] == "}":
            return f"(?:{'|'.join(choices)})", at + 1


def _number_range(text: str, opened: int, found: re.Match[str]) -> str:
    first, last = int(found[1]), int(found[2])
    if abs(last - first) > _LONGEST_RANGE:
        raise PatternError(f"pattern {text!r}: the range at {opened + 1} has over {_LONGEST_RANGE} numbers", opened)
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-").startswith("0") for end in found.groups())
    width = max(len(found[1]), len(found[2])) if padded else 0
    step = 1 if last >= first else -1
    return f"(?:{'|'.join(re.escape(f'{number:0{width}d}') for number in range(first, last + step, step))})"


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
    numbered = [index for index, part in enumerate(parts) if part.isdigit()]
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
